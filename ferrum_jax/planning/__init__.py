"""What a model needs and can reach on devices that are not here, from its configuration alone."""
