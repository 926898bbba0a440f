"""The package held against results that others have published, at their settings."""
