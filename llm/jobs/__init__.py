"""Long jobs: from file to file, resumable after whatever ended them, split into shards and merged."""
