"""What is refused, or fails, today: an entry goes when its case trains. Nothing is ever different."""

NOT_YET: dict[tuple[str, str], str] = {}
