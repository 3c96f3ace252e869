"""How a clipped sum is computed: by vmap, by a loop or by `ghost/`; norms and styles."""
