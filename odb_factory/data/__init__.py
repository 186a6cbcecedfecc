"""The running loader: observe, agree, plan, redistribute, collate."""
