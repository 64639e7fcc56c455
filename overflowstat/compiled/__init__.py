"""Module calls inside of what torch.compile makes: hooks are traced with the model, and read tensors in its graph."""
