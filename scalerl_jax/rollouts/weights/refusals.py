"""What a server may say to a version of the weights, other than that it took it."""


class PushRefused(Exception):
    """The server did not take the version; its weights are as they were."""


class FullSyncNeeded(PushRefused):
    """The server's copy is not what a delta starts from: it needs a dense version."""
