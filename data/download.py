"""download.py -- files from the network: resumed after a lost connection, checked by published size and sha256."""
import json
import os
import shutil
import time

from common import BadInput, Interrupted, Progress, human, need, say, sha256_of, sync_directory, writing
from sources import files_in

PARTIAL = ".partial"
TRIES = 8
TIMEOUT = (20, 60)                                      # seconds: to connect, to wait for data


def hub():
    """the hub that the data sets come from; HF_ENDPOINT names a mirror, as for the hub's own tools"""
    return os.environ.get("HF_ENDPOINT", "https://huggingface.co").rstrip("/")


def session():
    s = need("requests").Session()
    s.headers["User-Agent"] = "cable.c data scripts"
    if os.environ.get("HF_TOKEN"):                      # requests drops it when a redirect leaves the host
        s.hub_token = {"Authorization": "Bearer " + os.environ["HF_TOKEN"]}
    return s


def headers_for(s, url):
    return dict(getattr(s, "hub_token", {})) if url.startswith(hub() + "/") else {}


def get(s, url):
    r = s.get(url, timeout=TIMEOUT, headers=headers_for(s, url))
    r.raise_for_status()
    return r


def pause(attempt):
    """waits 1, 2, 4 ... 64 s; tests shorten it"""
    time.sleep(min(2 ** attempt, 64) * float(os.environ.get("DOWNLOAD_PAUSE", "1")))


def with_retries(what, action, arrived=lambda: 0):
    """Repeats action() until it succeeds; an error that will not pass ends it at once. arrived() says how many bytes
    are there so far: a try that brought some does not count."""
    requests = need("requests")
    attempt, before = 0, arrived()
    while attempt < TRIES:
        try:
            return action()
        except requests.HTTPError as e:
            status = e.response.status_code
            if status < 500 and status not in (408, 429):
                hint = {401: " (it may need an account: set HF_TOKEN)", 403: " (it may need an account: set HF_TOKEN)",
                        404: " (moved? get the file by other means and give --local)"}.get(status, "")
                raise BadInput(f"{what}: the server answered {status}{hint}") from None
            trouble = f"the server answered {status}"
        except (requests.Timeout, TimeoutError) as e:
            trouble = f"no answer in time ({type(e).__name__})"
        except (requests.RequestException, ConnectionError) as e:
            trouble = f"{'connection lost' if arrived() else 'no connection'} ({type(e).__name__})"
        if arrived() > before:
            attempt, before = 0, arrived()
        attempt += 1
        if attempt < TRIES:
            say(f"{what}: {trouble}; trying again, {attempt} of {TRIES - 1}")
            pause(attempt - 1)
    raise Interrupted(f"{what}: {trouble}, after {TRIES} tries; what arrived is kept")


def listed_file(entry, ending):
    """(path, size, sha256 or None) of an entry of the hub's listing; None: not a file with this ending"""
    path, size, lfs = entry["path"], entry.get("size"), entry.get("lfs")
    if entry["type"] != "file" or not path.endswith(ending):
        return None
    sha256 = lfs["oid"] if isinstance(lfs, dict) else lfs
    return path, -1 if size is None else int(size), sha256


def hub_files(repo, prefix="", ending=""):
    """[(path, size, sha256 or None)] of a data set on the hub, sorted"""
    s = session()
    url = f"{hub()}/api/datasets/{repo}/tree/main/{prefix}".rstrip("/") + "?recursive=true&limit=1000"
    found, pages = [], set()
    while url:
        if url in pages:
            raise BadInput(f"{repo}: the hub's listing has no end: it names a page again")
        pages.add(url)
        r = with_retries(repo, lambda: get(s, url))
        try:
            found += filter(None, (listed_file(entry, ending) for entry in json.loads(r.content)))
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as e:
            raise BadInput(f"{repo}: the hub's listing has an unknown form ({e})") from None
        url = r.links.get("next", {}).get("url")
    if not found:
        raise BadInput(f"{repo}: no file {prefix}*{ending} on the hub")
    return sorted(found, key=lambda f: f[0])


def hub_url(repo, path, kind="datasets/"):
    return f"{hub()}/{kind}{repo}/resolve/main/{path}"


def size_of(path):
    """bytes of a file; 0 where there is none"""
    return os.path.getsize(path) if os.path.exists(path) else 0


def check(path, size, sha256, advice):
    """raises BadInput if a file is not what its source says"""
    found = os.path.getsize(path)
    if size >= 0 and found != size:
        raise BadInput(f"{path}: expected {size} bytes as in its source, got {found}; {advice}")
    if sha256 and sha256_of(path) != sha256:
        raise BadInput(f"{path}: expected sha256 {sha256[:12]}... as in its source, got another; {advice}")


def download(url, path, size=-1, sha256=None):
    """path, whole and checked; continues from the partial file that an earlier try left beside it"""
    if os.path.exists(path):
        check(path, size, sha256, "remove it to download again")
        return path
    directory = os.path.dirname(path)
    partial = path + PARTIAL
    if os.path.islink(partial):
        raise BadInput(f"{partial}: expected a file, got a symbolic link; remove it")
    with writing(path):
        os.makedirs(directory, exist_ok=True)
        free = shutil.disk_usage(directory).free
    have = size_of(partial)
    if size >= 0 and free < size - have:
        raise BadInput(f"{path}: the disk is full: {human(size - have)} still to download, {human(free)} free; "
                       "make room or give another --cache")
    s = session()
    with_retries(os.path.basename(path), lambda: fetch(s, url, path, size), lambda: size_of(partial))
    try:
        check(partial, size, sha256, "the file was removed: run the same command again")
    except BadInput:
        os.remove(partial)
        raise
    with writing(path):
        os.replace(partial, path)
        sync_directory(directory)
    return path


def fetch(s, url, path, size):
    """one try, which starts where the partial file ends"""
    partial = path + PARTIAL
    have = size_of(partial)
    if 0 <= size < have:
        os.remove(partial)
        have = 0
    if have == size:
        return
    headers = {"Accept-Encoding": "identity", **headers_for(s, url)}
    if have:
        headers["Range"] = f"bytes={have}-"
    with s.get(url, headers=headers, stream=True, timeout=TIMEOUT) as r:
        if r.status_code == 416:                        # nothing follows: the file is whole, or belongs to another one
            total = r.headers.get("Content-Range", "").rpartition("/")[2]
            if total.isdigit() and int(total) == have:
                return
            os.remove(partial)
            raise ConnectionError("the partial file belongs to another version")
        r.raise_for_status()
        if have and (r.status_code != 206 or not r.headers.get("Content-Range", "").startswith(f"bytes {have}-")):
            have = 0                                    # the server sends the whole file again
        length = r.headers.get("Content-Length")
        total = have + int(length) if length and length.isdigit() else size     # -1: unknown
        progress = Progress(max(total, 0), os.path.basename(path))
        try:
            with writing(path):
                f = open(partial, "r+b" if have else "wb")
            with f:
                f.seek(have)
                for block in r.iter_content(1 << 16):   # a lost connection costs at most this much
                    with writing(path):
                        f.write(block)
                    have += len(block)
                    progress.update(have, 0)
                with writing(path):
                    f.truncate(have)
                    f.flush()
                    os.fsync(f.fileno())
        finally:
            progress.close()
    if 0 <= total != have:
        raise ConnectionError(f"connection lost after {have} of {total} bytes")


def cache_of(args):
    return args.cache or os.path.join(args.out, "source")


def source_files(args, repo, prefix, *kinds):
    """at most --files files of a data set: those of these kinds below --local, or those of the first kind on the hub"""
    if args.local:
        return files_in([args.local], kinds)[:args.files or None]
    return hub_download(repo, hub_files(repo, prefix, kinds[0])[:args.files or None], cache_of(args))


def hub_download(repo, entries, cache):
    """downloads the entries of hub_files() and returns their paths"""
    paths = []
    for path, size, sha256 in entries:
        target = os.path.join(cache, path)
        root, directory = os.path.realpath(cache), os.path.realpath(os.path.dirname(target))
        plain = all(p not in ("", ".", "..") for p in path.split("/")) and path.isprintable() and "\\" not in path
        if not plain or os.path.commonpath((root, directory)) != root:
            raise BadInput(f"{target!r}: this file of {repo} would lie outside {cache}")
        paths.append(download(hub_url(repo, path), target, size, sha256))
    return paths


BERT_VOCAB = ("google-bert/bert-base-uncased", "vocab.txt", 231508,
              "07eced375cec144d27c900241f3e339478dec958f92fddbc551f295c992038a3")


def vocabulary(args):
    """The directory of the tokenizer's files: --tokenizer, or --local if it has them, or the cache after a download.
    None means that tiktoken gets GPT-2's itself."""
    if args.tokenizer:
        return args.tokenizer
    names = ("vocab.txt",) if args.encoding == "bert" else ("encoder.json", "vocab.json")
    if args.local and any(os.path.isfile(os.path.join(args.local, n)) for n in names):
        return args.local
    if args.encoding == "gpt2" or args.local:
        return None
    repo, name, size, sha256 = BERT_VOCAB
    path = os.path.join(cache_of(args), "bert-base-uncased", name)
    return os.path.dirname(download(hub_url(repo, name, kind=""), path, size, sha256))
