"""A real federation on Flower: site and coordinator apart, joined by packets of releases and public facts."""
