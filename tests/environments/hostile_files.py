"""Programs that mean harm: input and output, files, and the kernel."""

from tests.environments.sandboxes import attempt

# name: (program, verdicts that are right)
FILES: dict[str, tuple[str, set[str]]] = {
    "endless output": (
        """
while True:
    print('42')
""",
        {"output"},
    ),
    "endless line": (
        """
import sys
while True:
    sys.stdout.write('x' * 4096)
""",
        {"output"},
    ),
    "endless errors": (
        """
import sys
while True:
    sys.stderr.write('x' * 4096)
""",
        {"output"},
    ),
    "bytes that are no text": (
        """
import os
while True:
    os.write(1, os.urandom(256))
    break
""",
        {"wrong"},
    ),
    "closes standard output": (
        """
import os
os.close(1)
os.close(2)
print(int(input()) * 2)
""",
        {"crashed", "wrong"},
    ),
    "reads forever": (
        """
import sys
n = int(sys.stdin.read())
while True:
    sys.stdin.read()
    sys.stdin.seek(0)
""",
        {"timeout"},
    ),
    "sleeps": (
        """
import time
time.sleep(600)
""",
        {"timeout"},
    ),
    "writes more than there is room for": (
        attempt("""
with open('/tmp/x', 'wb') as f:
    for _ in range(2**14):
        f.write(bytes(2**16))
escaped = True
"""),
        {"ok"},
    ),
    "many files with much in them": (
        attempt("""
for i in range(100):
    with open(f'/tmp/{i}', 'wb') as f:
        f.write(bytes(2**15))
escaped = True
"""),
        {"ok"},
    ),
    "many files with nothing in them": (
        """
i = 0
while True:
    open(f'/tmp/{i}', 'w').close()
    i += 1
""",
        {"output"},
    ),
    "reads files of the machine": (
        attempt("""
for path in ('/etc/passwd', '/etc/hostname', '/root/.bashrc', '/home', '/work', '/var', '/proc/1/environ',
             '/proc/self/root/etc/passwd', '/proc/1/root/etc/passwd', '/proc/self/mem', '/sys', '/run',
             '/dev/mem', '/dev/sda', '/dev/vda', '/dev/shm/machine', '/dev/kmsg', '/dev/pts'):
    try:
        os.stat(path)
        escaped = True
    except OSError:
        pass
escaped = escaped or os.listdir('/dev/shm') != []  # its own
"""),
        {"ok"},
    ),
    "goes up from where it is": (
        attempt("""
os.chdir('..')
os.chdir('../..')
escaped = bool({'etc', 'proc', 'var', 'sys'} & set(os.listdir('.')))
"""),
        {"ok"},
    ),
    "a link out": (
        attempt("""
os.symlink('/proc/1/root', '/tmp/out')
escaped = os.path.exists('/tmp/out/etc')
"""),
        {"ok"},
    ),
    "writes outside": (
        attempt("""
for path in ('/x', '/usr/lib/x', '/dev/x', os.__file__, sys.executable, os.path.dirname(os.__file__) + '/x.py',
             os.path.dirname(os.__file__) + '/site-packages/x.py'):
    try:
        open(path, 'ab').close()
        escaped = True
    except OSError:
        pass
"""),
        {"ok"},
    ),
    "makes a device": (
        attempt("""
import stat
os.mknod('/tmp/disk', 0o600 | stat.S_IFBLK, os.makedev(8, 0))
escaped = True
"""),
        {"ok"},
    ),
    "reads the environment": (
        attempt("""
escaped = bool(set(os.environ) - {'PYTHONHASHSEED', 'HOME', 'LANG', 'PWD', 'LC_CTYPE'})
"""),
        {"ok"},
    ),
    "opens a socket": (
        attempt("""
import socket
socket.socket()
escaped = True
"""),
        {"ok"},
    ),
    "asks a name server": (
        attempt("""
import socket
socket.getaddrinfo('example.org', 80)
escaped = True
"""),
        {"ok"},
    ),
    "traces its parent": (
        attempt("""
import ctypes
c = ctypes.CDLL(None, use_errno=True)
escaped = c.ptrace(16, os.getppid(), 0, 0) == 0 or ctypes.get_errno() != 1
"""),
        {"ok"},
    ),
    "mounts": (
        attempt("""
import ctypes
c = ctypes.CDLL(None, use_errno=True)
escaped = c.mount(b'proc', b'/tmp', b'proc', 0, None) == 0 or ctypes.get_errno() != 1
"""),
        {"ok"},
    ),
    "new namespaces": (
        attempt("""
import ctypes
c = ctypes.CDLL(None, use_errno=True)
for flag in (0x10000000, 0x20000, 0x40000000, 0x20000000):
    escaped = escaped or c.unshare(flag) == 0 or ctypes.get_errno() != 1
    pid = c.syscall(56 if os.uname().machine == 'x86_64' else 220, flag | 17, 0, 0, 0, 0)
    if pid == 0:
        os._exit(0)
    escaped = escaped or pid > 0
"""),
        {"ok"},
    ),
    "becomes root": (
        attempt("""
os.setuid(0)
escaped = True
"""),
        {"ok"},
    ),
    "chroot": (
        attempt("""
os.mkdir('/tmp/r')
os.chroot('/tmp/r')
escaped = True
"""),
        {"ok"},
    ),
}
