"""The proof that the documents of a packed batch are isolated: of unknown modules in a forward, and for users."""
