"""What Flower starts at a site for every message."""

from fedtorch.sites.flower import site as flower

app = flower.app()
