"""Attacks as a yardstick: how much somebody finds out who has what a federation gives away."""

from fedtorch.trust.attacks.membership import Membership as Membership, membership as membership
