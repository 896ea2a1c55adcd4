def checks(world_size):
    return {}
