"""Models as `nn.Module`s; they know nothing of federation."""
