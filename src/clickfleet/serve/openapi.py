def description(name: str) -> dict:
    return {}
