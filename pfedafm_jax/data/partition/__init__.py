"""Which client has which samples: `partition` assigns them, `shares` says how many."""
