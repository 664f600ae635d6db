"""download.py -- files from the hub of Hugging Face and from GitHub, checked by published size and sha256.

huggingface_hub tries again when a connection is lost. HF_ENDPOINT names a mirror, and HF_TOKEN is the token of an
account there.
"""
import http.client
import os
import urllib.error
import urllib.request

from common import BadInput, Interrupted, need, sha256_of, write_file, writing
from sources import files_in

TIMEOUT = 60                                            # seconds that a server may be silent
BERT_VOCAB = ("google-bert/bert-base-uncased", "vocab.txt", 231508,
              "07eced375cec144d27c900241f3e339478dec958f92fddbc551f295c992038a3")


def refused(what, status):
    """the error for a server's answer: Interrupted if another try may succeed, else BadInput"""
    if status >= 500 or status in (408, 429):
        return Interrupted(f"{what}: the server answered {status}; what arrived is kept")
    hint = {401: " (it may need an account: set HF_TOKEN)", 403: " (it may need an account: set HF_TOKEN)",
            404: " (moved? get the file by other means and give --local)"}.get(status, "")
    return BadInput(f"{what}: the server answered {status}{hint}")


def ask(what, action):
    """what action(hub) returns; the hub's errors become BadInput or Interrupted"""
    errors = need("huggingface_hub.errors")
    try:
        return action(need("huggingface_hub").HfApi(endpoint=os.environ.get("HF_ENDPOINT")))
    except Exception as e:              # the library's errors of the network have several bases
        if isinstance(e, errors.HfHubHTTPError) and e.response is not None:
            raise refused(what, e.response.status_code) from None
        if isinstance(e, OSError) and e.errno:
            raise                       # of the disk
        reason = f"{what}: {type(e).__name__}: {(str(e).splitlines() or [''])[0]}"
        if isinstance(e, (ValueError, KeyError, TypeError, AttributeError, RecursionError)):
            raise BadInput(reason) from None                # a name or an answer of a form that it does not know
        raise Interrupted(reason + "; what arrived is kept") from None


def hub_files(repo, prefix="", ending=""):
    """[(path, size, sha256 or None)] of a data set on the hub, sorted"""
    listed = ask(repo, lambda hub: list(hub.list_repo_tree(repo, prefix or None, recursive=True, repo_type="dataset")))
    found = [(e.path, e.size, e.lfs and e.lfs.sha256) for e in listed if hasattr(e, "size") and e.path.endswith(ending)]
    if not found:
        raise BadInput(f"{repo}: no file {prefix}*{ending} on the hub")
    return sorted(found, key=lambda f: f[0])


def check(path, size, sha256):
    """raises BadInput if a file is not what its source says; None: it does not say"""
    found = os.path.getsize(path)
    if size not in (None, found):
        raise BadInput(f"{path}: expected {size} bytes as in its source, got {found}; remove it to download again")
    if sha256 and sha256_of(path) != sha256:
        raise BadInput(f"{path}: expected sha256 {sha256[:12]}... as in its source, got another; remove it to download "
                       "again")
    return path


def hub_file(repo, name, cache, size=None, sha256=None, kind="dataset"):
    """the path of a file of the hub below `cache`, whole and checked"""
    with writing(os.path.join(cache, name)):
        path = ask(name, lambda hub: hub.hf_hub_download(repo, name, repo_type=kind, local_dir=cache))
    return check(path, size, sha256)


def download(url, path, size=None, sha256=None):
    """path, a small file, whole and checked"""
    if not os.path.exists(path):
        try:
            with urllib.request.urlopen(url, timeout=TIMEOUT) as answer:
                data = answer.read()
        except urllib.error.HTTPError as e:
            raise refused(url, e.code) from None
        except (OSError, http.client.HTTPException) as e:
            raise Interrupted(f"{url}: no connection, or it was lost ({e})") from None
        with writing(path):
            os.makedirs(os.path.dirname(path), exist_ok=True)
        write_file(path, data)
    return check(path, size, sha256)


def cache_of(args):
    return args.cache or os.path.join(args.out, "source")


def source_files(args, repo, prefix, *kinds):
    """at most --files files of a data set: those of these kinds below --local, or those of the first kind on the hub"""
    if args.local:
        return files_in([args.local], kinds)[:args.files or None]
    return hub_download(repo, hub_files(repo, prefix, kinds[0])[:args.files or None], cache_of(args))


def hub_download(repo, entries, cache):
    """downloads the entries of hub_files() and returns their paths"""
    return [hub_file(repo, name, cache, size, sha256) for name, size, sha256 in entries]


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
    return os.path.dirname(hub_file(repo, name, os.path.join(cache_of(args), "bert-base-uncased"), size, sha256,
                                    kind="model"))
