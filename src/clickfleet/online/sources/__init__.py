"""Where the passes of online learning come from: folders, Kafka, an iterable of the user."""
