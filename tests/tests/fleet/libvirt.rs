//! Tests libvirt domains with vGPUs.

use anyhow::{Context, Result, bail, ensure};
use tests::Debian;

use crate::site::{Form, WAIT_TIMEOUT, blocks, json, names, start_service, start_up};

/// Admin socket of the service.
const SOCKET: &str = "/run/gpu-mediator/admin.sock";
/// Command that configures libvirt for a host without D-Bus, log daemon, security modules, or separate control groups.
const CONFIG: &str = "printf 'auth_unix_rw = \"none\"\\nauth_unix_ro = \"none\"\\n' >> /etc/libvirt/libvirtd.conf && printf 'user = \
    \"libvirt-qemu\"\\ngroup = \"kvm\"\\nstdio_handler = \"file\"\\nsecurity_driver = \"none\"\\nnamespaces = []\\ncgroup_controllers = \
    []\\nremember_owner = 0\\n' >> /etc/libvirt/qemu.conf && mkdir -p /var/lib/libvirt/qemu /var/cache/libvirt/qemu && chown \
    libvirt-qemu:kvm /var/lib/libvirt/qemu";
/// The operator's guide, with the commands that create and start the domain.
const PAGE: &str = include_str!("../../../docs/guides/libvirt.md");
/// Changes to the domain: no KVM, a kernel, and serial ports for the console and for communication with init.
const CHANGES: &str = "sed -i -e \"s#type='kvm'#type='qemu'#\" -e \"s#<cpu mode=.*#<cpu mode='maximum'/>#\" -e \"s#</os>#\
    <kernel>/srv/vm/vmlinuz</kernel><initrd>/srv/vm/initrd</initrd><cmdline>console=ttyS0 no_timer_check panic=0</cmdline></os>#\" -e \
    \"s#<serial type='pty'/>#<serial type='file'><source path='/srv/vm/console.log'/></serial><serial type='pipe'>\
    <source path='/srv/vm/agent'/></serial>#\" web.xml && mkfifo agent.in agent.out && touch console.log answers && chown -R libvirt-qemu .";

/// Command that computes QEMU's permissions under libvirt's AppArmor profile with the package's additions. The kernel
/// does not enforce the profile here.
const PROFILE: &str = "printf '#include <tunables/global>\nprofile test /usr/bin/qemu-system-x86_64 {\n #include <abstractions/libvirt-qemu>\n\
    }\n' > /tmp/profile && apparmor_parser --skip-kernel-load --skip-cache /tmp/profile && apparmor_parser --skip-kernel-load --skip-cache \
    --preprocess /tmp/profile | grep -q 'run/gpu-mediator/[*].sock rw'";

/// Waits until at least `count` lines of `file` contain a text. The files contain the guest's replies and its
/// console output.
fn wait_for_text(host: &Debian, what: &str, file: &str, count: u32) -> Result<()> {
    host.until(what, &format!("test $(grep -c '{what}' /srv/vm/{file}) -ge {count}"), WAIT_TIMEOUT).map(drop)
}

fn start(host: &Debian) -> Result<()> {
    host.ok("virsh --quiet start web")?;
    runs(host)
}

/// Checks that the domain has its vGPU.
fn runs(host: &Debian) -> Result<()> {
    let vm = json(host, "vm show web")?;
    ensure!(vm["state"] == "connected" && vm["profile"] == "desktop", "the domain's vGPU: {vm:#}");
    Ok(())
}

/// Waits until the vGPU no longer exists, and checks that the domain is shut off.
fn is_gone(host: &Debian) -> Result<()> {
    host.until("the removal of the vGPU", "mediatorctl vm list | grep -q '^no VMs'", WAIT_TIMEOUT)?;
    host.ok("test \"$(virsh domstate web)\" = 'shut off' && test ! -e /run/gpu-mediator/web.sock").map(drop)
}

#[test]
fn domains_of_libvirt_have_vgpus() -> Result<()> {
    let Some(host) = start_up("libvirt", Form::Deb)? else { return Ok(()) };
    let host = &host;
    start_service(host)?;
    host.ok(PROFILE)?;
    host.ok(CONFIG)?;
    host.start("virt", "exec libvirtd")?;
    let shell = blocks(PAGE, "sh");
    let [describe, run] = &shell[..] else {
        bail!("docs/guides/libvirt.md does not have exactly two blocks of commands")
    };
    let (define, starts) = run.trim().split_once('\n').context("docs/guides/libvirt.md: two commands")?;
    host.ok(&format!("cd /srv/vm && {describe}"))?;
    host.ok(&format!("cd /srv/vm && {CHANGES}"))?;
    host.until("libvirt to respond", "virsh --quiet list", WAIT_TIMEOUT)?;
    host.ok(&format!("cd /srv/vm && {define}"))?;
    ensure!(names(host, SOCKET, "vm")?.is_empty(), "a domain that does not run has a vGPU");
    host.start("answers", "while true; do cat /srv/vm/agent.out >> /srv/vm/answers; done")?;
    host.ok(starts)?;
    runs(host)?;
    host.ok("test \"$(stat -c '%U %a' /run/gpu-mediator/web.sock)\" = 'libvirt-qemu 600'")?;
    wait_for_text(host, "READY", "answers", 1)?;
    host.ok("printf '1 load\\n' > /srv/vm/agent.in")?;
    wait_for_text(host, "1 = 0", "answers", 1)?;
    host.ok("grep 'Initialized nouveau' /srv/vm/console.log")?;
    // Reboot and reset the guest, which must keep its vGPU.
    let before = json(host, "vm show web")?;
    host.ok("printf '2 reboot\\n' > /srv/vm/agent.in")?;
    wait_for_text(host, "READY", "answers", 2)?;
    host.ok("printf '3 load\\n' > /srv/vm/agent.in")?;
    wait_for_text(host, "3 = 0", "answers", 1)?;
    host.ok("virsh --quiet reset web")?;
    wait_for_text(host, "READY", "answers", 3)?;
    let after = json(host, "vm show web")?;
    ensure!(after["state"] == "connected" && after["socket"] == before["socket"], "{after:#}");
    ensure!(after["counters"]["resets"].as_u64() > before["counters"]["resets"].as_u64(), "{after:#}");
    host.ok("virsh --quiet destroy web")?;
    is_gone(host)?;
    // Kill QEMU. The hook must clean up, even if libvirt is stopped and detects the exit later.
    start(host)?;
    host.ok("kill -9 $(cat /run/libvirt/qemu/web.pid)")?;
    is_gone(host)?;
    start(host)?;
    host.kill("virt")?;
    host.ok("kill -9 $(cat /run/libvirt/qemu/web.pid)")?;
    host.start("virt", "exec libvirtd")?;
    host.until("libvirt to respond", "virsh --quiet list", WAIT_TIMEOUT)?;
    is_gone(host)?;
    // A domain that does not fit on the card fails to start, and libvirt reports the reason.
    host.ok("mediatorctl vm add hog --card card0 --vram-mib 192")?;
    let refused = host.sh("virsh --quiet start web")?;
    ensure!(refused.code != 0 && refused.text().contains("no card has enough free capacity"), "{}", refused.text());
    host.ok("mediatorctl vm remove hog && virsh --quiet undefine web")?;
    ["virt", "answers", "gpu-mediator"].iter().try_for_each(|unit| host.stop(unit))
}
