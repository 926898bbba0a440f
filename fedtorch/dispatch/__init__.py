"""Choose between an operation's torch reference and its GPU program, and launch the program."""
