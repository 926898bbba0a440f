"""What a run leaves on the disk by which its server, or a site, goes on where its process has ended."""
