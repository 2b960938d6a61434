"""What two processes with tests share out: files, and folders that share a service."""

from xdist.scheduler import LoadFileScheduling

_TOGETHER = ("tests/serve/shared/",)


class FoldersAndFiles(LoadFileScheduling):
    """The tests of a file run in one process, as do those of a folder with one service for all."""

    def _split_scope(self, nodeid: str) -> str:
        folders = [folder for folder in _TOGETHER if nodeid.startswith(folder)]
        return folders[0] if folders else super()._split_scope(nodeid)
