"""The parts that pipeline authors use: pipelines, pages, selectors."""
