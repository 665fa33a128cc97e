"""What takes the place of FastDeploy's latent attention.

FastDeploy names its backends in an enum of its own, and no package can register one: a subclass of
``MLAAttentionBackend`` calls this where ``k`` is ``None``, as the page on engines shows.
"""
