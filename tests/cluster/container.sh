#!/usr/bin/env bash
# A task's container, as far as a trial can tell: run in a mount namespace of its own, it builds a root folder whose
# /run and /tmp are empty and whose storage is where the harness looks for it, and starts the trial in it as
# Determined's entrypoint does. Nothing of it is seen from outside.
#
#   container.sh ROOT STORAGE BIN [MORE ...]      start the trial
#   container.sh --probe ROOT STORAGE [MORE ...]  only build the folder
#
# ROOT: an empty folder. STORAGE: the shared file system. BIN: where python3 and deepspeed are. MORE:
# folders below /run or /tmp that are to be seen all the same. The network is this machine's, as with network_mode: host.
set -eu
probe=
if [ "$1" = --probe ]; then
    probe=1
    shift
fi
root=$1
storage=$2
shift 2
if [ -z "$probe" ]; then
    bin=$1
    shift
fi

mount -t tmpfs -o mode=755 none "$root"
for entry in /*; do
    case $entry in /run | /tmp | /determined_shared_fs | /lost+found) continue ;; esac
    if [ -L "$entry" ]; then
        cp -P "$entry" "$root/"
    elif [ -d "$entry" ]; then
        mkdir "$root$entry"
        mount --rbind "$entry" "$root$entry"
    fi
done
mkdir -p "$root/run/determined/workdir" "$root/run/determined/info" "$root/run/determined/train/logs" \
    "$root/run/determined/train/model" "$root/run/determined/pythonuserbase/bin" "$root/run/determined/home" \
    "$root/run/lock" "$root/tmp" "$root/determined_shared_fs"
chmod 1777 "$root/tmp"
mount --bind "$storage" "$root/determined_shared_fs"
for more in "$@"; do
    mkdir -p "$root$more"
    mount --rbind "$more" "$root$more"
done
if [ -n "$probe" ]; then
    exec chroot "$root" /bin/bash -c 'touch /determined_shared_fs/probe /run/determined/probe && test -r /proc/self/stat'
fi

# Before deepspeed itself stands this: Determined gives deepspeed five seconds to end after its ranks and then ends it,
# which counts as a failure: too few where many tests share a machine, so this one waits.
cat >"$root/run/determined/pythonuserbase/bin/deepspeed" <<SHIM
#!/usr/bin/env bash
"$bin/deepspeed" "\$@" &
trap true TERM
wait \$!
code=\$?
while kill -0 \$! 2>/dev/null; do
    wait \$!
    code=\$?
done
exit \$code
SHIM

chmod +x "$root/run/determined/pythonuserbase/bin/deepspeed"

cat >"$root/run/determined/entrypoint.sh" <<'ENTRYPOINT'
cd /run/determined/workdir
export PATH="/run/determined/pythonuserbase/bin:$PATH"
ln -sf /proc/$$/fd/1 /run/determined/train/logs/stdout.log
ln -sf /proc/$$/fd/2 /run/determined/train/logs/stderr.log
set -e
python3 -m determined.exec.prep_container --download_context_directory --resources --proxy
set -x
test -f startup-hook.sh && source startup-hook.sh
set +x
python3 -m determined.exec.prep_container --rendezvous
exec python3 -m determined.exec.launch
ENTRYPOINT
exec chroot "$root" /bin/bash /run/determined/entrypoint.sh
