"""The parties and the server of a vertical fit, and the iterations between them."""
