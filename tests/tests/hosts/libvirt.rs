//! Domains of libvirt with vGPUs.

use anyhow::{Result, ensure};
use tests::Host;

use crate::site::{LIMIT, json, names};

/// The service's admin socket.
const SOCKET: &str = "/run/gpu-mediator/admin.sock";
/// libvirt without what this host has not: D-Bus, a log daemon, control groups of its own.
const CONFIG: &str = "printf 'auth_unix_rw = \"none\"\\nauth_unix_ro = \"none\"\\n' >> /etc/libvirt/libvirtd.conf && printf 'user = \
    \"libvirt-qemu\"\\ngroup = \"kvm\"\\nstdio_handler = \"file\"\\nsecurity_driver = \"none\"\\nnamespaces = []\\ncgroup_controllers = \
    []\\nremember_owner = 0\\n' >> /etc/libvirt/qemu.conf && mkdir -p /var/lib/libvirt/qemu /var/cache/libvirt/qemu && chown \
    libvirt-qemu:kvm /var/lib/libvirt/qemu && chown root:kvm /dev/kvm && chmod 660 /dev/kvm";
/// The domain that `launch-args` prints, with a kernel, and lines to talk to its init by.
const DOMAIN: &str = "mediatorctl vm launch-args web --vmm libvirt --profile desktop --memory 512M | sed -e \"s#</os>#<kernel>/srv/vm/vmlinuz\
    </kernel><initrd>/srv/vm/initrd</initrd><cmdline>console=ttyS0 no_timer_check panic=0</cmdline></os>#\" -e \"s#<serial type='pty'/>#\
    <serial type='file'><source path='/srv/vm/console.log'/></serial><serial type='pipe'><source path='/srv/vm/agent'/></serial>#\" > \
    /srv/vm/web.xml && mkfifo /srv/vm/agent.in /srv/vm/agent.out && touch /srv/vm/console.log && chown -R libvirt-qemu /srv/vm";

/// Waits until something stands in the guest's answers or on its console.
fn says(host: &Host, what: &str, file: &str, count: u32) -> Result<()> {
    host.until(what, &format!("test $(grep -c '{what}' /srv/vm/{file}) -ge {count}"), LIMIT).map(drop)
}

fn start(host: &Host) -> Result<()> {
    host.ok("virsh --quiet start web")?;
    let vm = json(host, "vm show web")?;
    ensure!(vm["state"] == "connected" && vm["profile"] == "desktop", "the domain's vGPU: {vm:#}");
    Ok(())
}

/// Waits until the domain and its vGPU are gone.
fn is_gone(host: &Host) -> Result<()> {
    host.until("the vGPU to be gone", "mediatorctl vm list | grep -q '^no VMs'", LIMIT)?;
    host.ok("test \"$(virsh domstate web)\" = 'shut off' && test ! -e /run/gpu-mediator/web.sock").map(drop)
}

pub fn domains_have_vgpus(host: &Host) -> Result<()> {
    host.ok(CONFIG)?;
    host.ok("systemd-run --quiet --unit=virt /usr/sbin/libvirtd")?;
    host.ok(DOMAIN)?;
    host.until("libvirt to answer", "virsh --quiet define /srv/vm/web.xml", LIMIT)?;
    ensure!(names(host, SOCKET, "vm")?.is_empty(), "a domain that does not run has a vGPU");
    host.ok(
        "systemd-run --quiet --unit=answers sh -c 'while true; do cat /srv/vm/agent.out >> /srv/vm/answers; done'",
    )?;
    start(host)?;
    host.ok("test \"$(stat -c '%U %a' /run/gpu-mediator/web.sock)\" = 'libvirt-qemu 600'")?;
    says(host, "READY", "answers", 1)?;
    host.ok("printf '1 load\\n' > /srv/vm/agent.in")?;
    says(host, "1 = 0", "answers", 1)?;
    host.ok("grep 'Initialized nouveau' /srv/vm/console.log")?;
    // The guest starts again, with the same vGPU.
    let before = json(host, "vm show web")?;
    host.ok("printf '2 reboot\\n' > /srv/vm/agent.in")?;
    says(host, "READY", "answers", 2)?;
    host.ok("virsh --quiet reset web")?;
    says(host, "READY", "answers", 3)?;
    let after = json(host, "vm show web")?;
    ensure!(after["state"] == "connected" && after["socket"] == before["socket"], "{after:#}");
    ensure!(after["counters"]["resets"].as_u64() > before["counters"]["resets"].as_u64(), "{after:#}");
    host.ok("virsh --quiet destroy web")?;
    is_gone(host)?;
    // QEMU is killed; the hook cleans up. So it does when libvirt was away, and learns of it later.
    start(host)?;
    host.ok("kill -9 $(cat /run/libvirt/qemu/web.pid)")?;
    is_gone(host)?;
    start(host)?;
    host.ok("systemctl kill --signal=KILL --kill-whom=main virt; kill -9 $(cat /run/libvirt/qemu/web.pid)")?;
    host.ok("systemctl reset-failed virt; systemd-run --quiet --unit=virt /usr/sbin/libvirtd")?;
    host.until("libvirt to answer", "virsh --quiet list", LIMIT)?;
    is_gone(host)?;
    // What there is no room for does not start, and says why.
    host.ok("mediatorctl vm add hog --card card0 --vram-mib 192")?;
    let refused = host.sh("virsh --quiet start web")?;
    ensure!(refused.code != 0 && refused.text().contains("no card has room"), "{}", refused.text());
    host.ok("mediatorctl vm remove hog && virsh --quiet undefine web && systemctl stop virt answers").map(drop)
}
