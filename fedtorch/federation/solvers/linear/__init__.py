"""Linear models by gradient descent: recognise them, and take all steps of a round by one program."""
