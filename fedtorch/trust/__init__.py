"""What a federation does about clients that are not to be trusted."""
