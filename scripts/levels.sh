#!/usr/bin/env bash
# Every native kernel at every level of instructions, also at those this processor lacks: NEON under QEMU, AVX-512 with and
# without BF16 instructions under Bochs, as the only process of a Linux of its own. tests/native says what is compared. What
# something is missing for is skipped, with the reason.
#
#   scripts/levels.sh [trials of each kernel under emulation, 60]
#
# Needs cmake and g++; for NEON g++-aarch64-linux-gnu and qemu-user; for AVX-512 a Debian, since Bochs 3 and a kernel are
# fetched from Debian 13 into build/levels (100 MB; nothing is installed, no root). Three minutes on two busy cores.
set -euo pipefail
cd "$(dirname "$0")/.."

trials=${1:-60}
home=$PWD/build/levels
mkdir -p "$home"

build() { # folder, CMake's arguments...
    cmake -S . -B "$home/$1" -DOCTAVO_LEVEL_CHECK=ON -DOCTAVO_MODULE=OFF "${@:2}" >/dev/null
    cmake --build "$home/$1" -j "$(nproc)" >/dev/null
}

has() { command -v "$1" >/dev/null; }

check_neon() {
    if ! has aarch64-linux-gnu-g++ || ! has qemu-aarch64; then
        echo "NEON skipped: needs g++-aarch64-linux-gnu and qemu-user"
        return
    fi
    build aarch64 -DCMAKE_SYSTEM_NAME=Linux -DCMAKE_SYSTEM_PROCESSOR=aarch64 -DCMAKE_CXX_COMPILER=aarch64-linux-gnu-g++
    qemu-aarch64 "$home/aarch64/levels" "$trials"
}

# Debian 13 in a folder: programs and files out of packages, run with their own libraries.
debian=$home/debian
keys=/usr/share/keyrings/debian-archive-keyring.gpg

mirror() { # where this machine has its own packages from
    apt-get indextargets --format '$(REPO_URI)' 'Origin: Debian' 'Label: Debian' | head -n 1
}

fetch_debian() {
    local apt=$home/apt package
    mkdir -p "$apt/lists/partial" "$apt/cache/archives/partial" "$debian"
    echo "deb [arch=amd64 signed-by=$keys] $(mirror) trixie main" >"$apt/sources.list"
    : >"$apt/status"
    local options=(-q -o "Dir::Etc::SourceList=$apt/sources.list" -o Dir::Etc::SourceParts=/dev/null
        -o "Dir::State::Lists=$apt/lists" -o "Dir::State::Status=$apt/status" -o "Dir::Cache=$apt/cache"
        -o APT::Sandbox::User= -o Debug::NoLocking=1)
    apt-get "${options[@]}" update || return
    apt-get "${options[@]}" install --yes --no-install-recommends --download-only \
        bochs bochs-term bochsbios vgabios isolinux syslinux-common xorriso cpio linux-image-cloud-amd64 || return
    for package in "$apt"/cache/archives/*.deb; do
        dpkg-deb --fsys-tarfile "$package" | tar -x -C "$debian" --keep-directory-symlink --exclude=./usr/lib/modules || return
    done
    touch "$debian/complete"
}

in_debian() { # program, arguments...
    "$debian/usr/lib/x86_64-linux-gnu/ld-linux-x86-64.so.2" --library-path "$debian/usr/lib/x86_64-linux-gnu" \
        "$debian/usr/bin/$1" "${@:2}"
}

# A CD whose Linux starts the program as its first process; its end is a panic, which ends the emulation. Two features are
# hidden from that Linux: AMX tiles, whose state Bochs has by halves, and fast short REP MOVSB, with which it hangs.
make_disc() {
    local disc=$home/disc
    rm -rf "$disc" "$home/initrd"
    mkdir -p "$disc/isolinux" "$home/initrd"
    strip -o "$home/initrd/init" "$home/host/levels"
    (cd "$home/initrd" && echo init | in_debian cpio --quiet -o -H newc) | gzip >"$disc/initrd.gz"
    cp "$debian"/boot/vmlinuz-* "$disc/vmlinuz"
    cp "$debian/usr/lib/ISOLINUX/isolinux.bin" "$debian/usr/lib/syslinux/modules/bios/ldlinux.c32" "$disc/isolinux"
    cat >"$disc/isolinux/isolinux.cfg" <<END
DEFAULT levels
LABEL levels
  KERNEL /vmlinuz
  APPEND initrd=/initrd.gz console=ttyS0 loglevel=1 panic=-1 reboot=t mitigations=off acpi=off clearcpuid=580,600 -- $trials
END
    in_debian xorriso -as mkisofs -quiet -o "$home/levels.iso" -b isolinux/isolinux.bin -c isolinux/boot.cat -no-emul-boot \
        -boot-load-size 4 -boot-info-table "$disc" 2>/dev/null
}

# Bochs wants a terminal, so `script` gives it one; c, continue, is a word to its debugger.
emulate() {
    local bochs=$debian/usr/share/bochs
    cat >"$home/bochsrc" <<END
display_library: term
cpu: model=sapphire_rapids, count=1, ips=50000000, reset_on_triple_fault=0
megs: 256
romimage: file=$bochs/BIOS-bochs-latest
vgaromimage: file=$bochs/VGABIOS-lgpl-latest
ata0-master: type=cdrom, path=$home/levels.iso, status=inserted
boot: cdrom
com1: enabled=1, mode=file, dev=$home/serial.txt
log: $home/bochs.log
panic: action=fatal
error: action=ignore
info: action=ignore
clock: sync=none
plugin_ctrl: speaker=0, gameport=0, parallel=0
END
    echo c >"$home/continue"
    rm -f "$home/serial.txt"
    export -f in_debian
    export debian LTDL_LIBRARY_PATH=$debian/usr/lib/x86_64-linux-gnu/bochs/plugins BXSHARE=$bochs
    SHELL=$BASH TERM=xterm timeout 3600 \
        script -qc "in_debian bochs-bin -q -f '$home/bochsrc' -rc '$home/continue'" "$home/screen.txt" >/dev/null </dev/null || true
    sed '/Kernel panic/,$d' "$home/serial.txt"
}

check_avx512() {
    if ! has apt-get || ! has script || [ ! -e "$keys" ] || [ -z "$(mirror)" ]; then
        echo "AVX-512 skipped: needs Debian's apt-get with package lists, script (bsdutils) and $keys"
        return
    fi
    if [ ! -e "$debian/complete" ] && ! fetch_debian >"$home/fetch.log" 2>&1; then
        echo "AVX-512 skipped: nothing could be fetched from Debian 13, see $home/fetch.log"
        return
    fi
    make_disc
    emulate
    grep -q "^avx512_bf16 .* compared" "$home/serial.txt" && grep -q "levels: all equal" "$home/serial.txt"
}

build host
"$home/host/levels" 1000
"$home/host/threads"
check_neon
case $(uname -m) in
    x86_64) check_avx512 ;;
    *) echo "AVX-512 skipped: its program is built on x86-64 only" ;;
esac
