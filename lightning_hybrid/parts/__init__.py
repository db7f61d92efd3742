"""What a rank holds of parameters that several ranks share: where the parts are, how they are cut and joined."""
