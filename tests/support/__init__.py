"""What several test modules share, in folders as the rooms of the source."""
