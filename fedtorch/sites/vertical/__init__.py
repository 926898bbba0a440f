"""Vertical protocols over streams between organisations: drivers, going on after cuts and kills."""
