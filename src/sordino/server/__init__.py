"""The server room: what the server decides from releases and public facts. Opens ``privacy.types`` only."""
