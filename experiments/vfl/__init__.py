"""Vertical federated learning by data augmentation and amortised inference (VFL)."""
