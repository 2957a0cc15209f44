"""The client room: what happens on a site. Opens privacy and models."""
