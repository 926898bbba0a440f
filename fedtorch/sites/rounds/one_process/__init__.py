"""What sites that share a process, each in a thread of its own, share with each other, and what they must not."""
