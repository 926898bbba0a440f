"""What Flower starts at a site for every message."""

from fedtorch.federation.remote import flower

app = flower.app()
