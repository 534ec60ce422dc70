# node_setup.sh FOLDER PACKAGES: process 1 of the node's namespaces makes FOLDER/root and becomes its systemd.
# On the node FOLDER is /mnt/node, and PACKAGES, a folder of installed distributions, /mnt/packages.
folder="$1"
packages="$2"
root="$folder/root"
mount --make-rprivate /

mount --bind "$root" "$root"
chmod 755 "$folder" "$root"
for name in usr etc var bin sbin lib lib32 lib64 libx32; do
    if [[ -L "/$name" ]]; then
        ln -s "$(readlink "/$name")" "$root/$name"
    elif [[ -d "/$name" ]]; then
        mkdir "$root/$name" "$folder/up-$name" "$folder/work-$name"
        mount -t overlay overlay -o "lowerdir=/$name,upperdir=$folder/up-$name,workdir=$folder/work-$name" "$root/$name"
    fi
done
mkdir "$root"/{opt,root,home,srv,srv/rosemux,run,tmp,proc,sys,dev,mnt}
chmod 700 "$root/root"
chmod 1777 "$root/tmp"
# What was installed by hand here is not the distribution's; services here are not the node's.
mkdir "$folder/local"
mount --bind "$folder/local" "$root/usr/local"
mkdir -p "$root"/usr/local/{bin,sbin,lib}
rm -rf "$root"/etc/systemd/system/*.wants "$root"/etc/rosemux "$root"/var/lib/rosemux* "$root"/etc/fstab
for unit in systemd-timesyncd systemd-udevd apt-daily.timer avahi-daemon.socket; do
    [[ "$unit" == *.* ]] || unit="$unit.service"
    ln -sf /dev/null "$root/etc/systemd/system/$unit"
done
echo rosemux-node >"$root/etc/hostname"

mount -t proc proc "$root/proc"
mount --bind "$root/proc/sys" "$root/proc/sys"
mount -o remount,bind,ro "$root/proc/sys"
mount -t sysfs -o ro sysfs "$root/sys"
mount -t tmpfs -o mode=755 tmpfs "$root/run"
mount -t tmpfs -o mode=755 tmpfs "$root/dev"
mkdir "$root"/dev/{shm,pts,mqueue,hugepages}
mount -t devpts -o newinstance,ptmxmode=666,mode=620,gid=5 devpts "$root/dev/pts"
ln -s pts/ptmx "$root/dev/ptmx"
mount -t tmpfs -o mode=1777 tmpfs "$root/dev/shm"
for device in null zero full random urandom tty; do
    touch "$root/dev/$device"
    mount --bind "/dev/$device" "$root/dev/$device"
done
ln -s /proc/self/fd "$root/dev/fd"
mount -t tmpfs -o mode=755 tmpfs "$root/sys/fs/cgroup"
mount -t cgroup2 cgroup2 "$root/sys/fs/cgroup"

mkdir "$root"/mnt/{node,packages}
mount --bind "$folder" "$root/mnt/node"
mount --bind -o ro "$packages" "$root/mnt/packages"
cd "$root"
pivot_root . mnt
umount -l mnt

# As a container's: no kernel module, clock or raw device from inside.
exec setpriv --bounding-set=-sys_module,-sys_time,-sys_rawio,-syslog,-audit_control \
    /usr/bin/env -i container=rosemux \
    /lib/systemd/systemd --system --unit=basic.target --log-target=journal --show-status=0
