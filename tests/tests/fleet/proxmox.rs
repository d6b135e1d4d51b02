//! Tests the Proxmox VE hook script, with a script that replaces `qm`.

use anyhow::{Result, bail, ensure};
use tests::Debian;

use crate::site::{Form, WAIT_TIMEOUT, blocks, json, start_service, start_up};

/// The operator's guide, with the commands that create and start the VM.
const PAGE: &str = include_str!("../../../docs/guides/proxmox.md");
/// Script that stores configurations as Proxmox does, calls the hook in each phase, and starts QEMU with a VM's `args`.
const QM: &str = r#"#!/bin/sh
set -e
command=$1 vmid=$2
shift 2
config=/etc/pve/qemu-server/$vmid.conf
value() { sed -n "s/^$1: //p" $config; }
hook() {
    script=$(value hookscript)
    test -z "$script" || /var/lib/vz/${script#local:} $vmid $1
}
case $command in
set)
    while test $# -gt 0; do
        key=${1#--}
        touch $config
        sed -i "/^$key: /d" $config
        printf '%s: %s\n' $key "$2" >> $config
        shift 2
    done ;;
config) cat $config ;;
start)
    hook pre-start
    eval "set -- $(value args)"
    setsid qemu-system-x86_64 -name vm$vmid -accel tcg -machine pc -m $(value memory) -display none -nodefaults -S \
        -pidfile /run/qm-$vmid.pid "$@" > /tmp/qm-$vmid.log 2>&1 < /dev/null &
    hook post-start ;;
stop)
    kill $(cat /run/qm-$vmid.pid)
    while test -e /run/qm-$vmid.pid; do sleep 0.1; done
    hook post-stop ;;
esac
"#;

/// Waits until VM 100 is connected to its vGPU.
fn is_connected(host: &Debian) -> Result<()> {
    let shown =
        "mediatorctl --json vm show pve100 | grep -q '\"state\": \"connected\"' || { cat /tmp/qm-100.log; false; }";
    host.until("QEMU to use the vGPU", shown, WAIT_TIMEOUT).map(drop)
}

#[test]
fn hook_of_proxmox_makes_and_removes_vgpus() -> Result<()> {
    let Some(host) = start_up("proxmox", Form::Deb)? else { return Ok(()) };
    let host = &host;
    host.write("/usr/sbin/qm", 0o755, QM)?;
    host.ok("mkdir -p /etc/pve/qemu-server")?;
    let [config] = &blocks(PAGE, "toml")[..] else { bail!("the page does not have exactly one configuration") };
    host.write("/etc/gpu-mediator.toml", 0o644, config)?;
    start_service(host)?;
    let [commands] = &blocks(PAGE, "sh")[..] else { bail!("the page does not have exactly one block of commands") };
    host.write("/root/page.sh", 0o644, commands)?;
    host.ok("sh -e /root/page.sh")?;
    is_connected(host)?;
    let shown = json(host, "vm show pve100")?;
    ensure!(shown["profile"] == "desktop" && shown["labels"]["proxmox_vmid"] == "100", "{shown:#}");
    host.ok("qm stop 100 && mediatorctl vm list | grep -q '^no VMs'")?;

    // Killing QEMU does not call the hook. The next start replaces the vGPU.
    host.ok("qm start 100")?;
    is_connected(host)?;
    host.ok("kill -KILL $(cat /run/qm-100.pid) && rm /run/qm-100.pid && qm start 100")?;
    is_connected(host)?;
    host.ok("qm stop 100")?;

    // A VM must not start without a profile, with two profiles, or with a vGPU created by an administrator.
    let refused = host.sh("qm set 100 --tags web && qm start 100")?;
    ensure!(refused.code == 1 && refused.text().contains("VM 100 has no tag gpu-PROFILE"), "{}", refused.text());
    let refused = host.sh("qm set 100 --tags 'gpu-a;gpu-b' && qm start 100")?;
    ensure!(refused.code == 1 && refused.text().contains("several tags"), "{}", refused.text());
    host.ok("qm set 100 --tags 'web;gpu-desktop' && mediatorctl vm add pve100 --profile desktop")?;
    let refused = host.sh("qm start 100")?;
    ensure!(refused.code != 0 && refused.text().contains("pve100"), "{}", refused.text());
    host.ok("/var/lib/vz/snippets/gpu-mediator-hook 100 post-stop && mediatorctl vm show pve100")?;
    host.stop("gpu-mediator")
}
