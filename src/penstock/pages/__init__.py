"""Page stores: raw responses, content-addressed."""
