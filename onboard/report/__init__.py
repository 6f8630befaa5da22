"""What a person reads before they trust a package."""
