"""The running loader: observe, window, plan, collate."""
