//! Tests the encrypting block device with Debian's NBD clients, on a vGPU of a daemon.

use std::fs::{self, Permissions};
use std::io::{BufRead, BufReader};
use std::os::unix::fs::PermissionsExt;
use std::process::{Child, Command, Stdio};

use anyhow::{Context, Result, ensure};
use tests::Daemon;
use tests::daemon::binary;
use tests::guest::{card_toml, vm_toml};
use tests::toolbox::Toolbox;
use tests::wait::Scratch;

/// Name of the VM with the block device's vGPU.
const VM: &str = "crypt";
/// Size of the disk in bytes.
const DISK_BYTES: usize = 24 << 20;
/// Command that copies a file to the device with one program, and back with another.
const COPY: &str = "set -e
uri='nbd+unix:///?socket=/mnt/disk.sock'
nbdinfo --size \"$uri\"
qemu-img convert -n -f raw -O raw /mnt/plain \"$uri\"
qemu-img compare -f raw -F raw /mnt/plain \"$uri\"
nbdcopy \"$uri\" /mnt/copy
cmp /mnt/plain /mnt/copy
";

/// The server, which is killed on drop.
struct Server(Child);

impl Server {
    fn start(folder: &Scratch, device: Option<&str>) -> Result<Self> {
        let mut command = Command::new(binary("gdev-crypt")?);
        command.arg("--file").arg(folder.path().join("disk")).arg("--key-file").arg(folder.path().join("key"));
        command.arg("--socket").arg(folder.path().join("disk.sock")).args(["--mode", "666"]);
        if let Some(device) = device {
            command.args(["--device", device, "--device-min-bytes", "65536"]);
        }
        let log = fs::File::create(folder.path().join("log"))?;
        let mut child = command.stdout(Stdio::piped()).stderr(log).spawn().context("the block device")?;
        let output = child.stdout.take().context("its output")?;
        let server = Self(child);
        let mut line = String::new();
        BufReader::new(output).read_line(&mut line)?;
        ensure!(line.starts_with("listening on"), "{}", fs::read_to_string(folder.path().join("log"))?);
        Ok(server)
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

#[test]
fn encrypted_disk_works_for_nbd_clients_after_its_card_is_gone() -> Result<()> {
    let scratch = Scratch::new("crypt")?;
    let path = |name: &str| scratch.path().join(name);
    let toolbox = Toolbox::open()?;
    let daemon = Daemon::start("crypt", |paths| card_toml(paths, 192) + &vm_toml(VM, 64))?;
    let mut random = fastrand::Rng::with_seed(11);
    let plain: Vec<u8> = std::iter::repeat_with(|| random.u8(..)).take(DISK_BYTES).collect();
    fs::write(path("plain"), &plain)?;
    fs::File::create(path("disk"))?.set_len(DISK_BYTES as u64)?;
    fs::write(path("key"), std::array::from_fn::<u8, 64, _>(|index| index as u8 + 1))?;
    fs::set_permissions(path("key"), Permissions::from_mode(0o600))?;
    let clients = |command: &str| -> Result<()> {
        let ended = toolbox.run(scratch.path(), command)?;
        ensure!(ended.code == Some(0), "{ended:?}; the server: {}", fs::read_to_string(path("log"))?);
        Ok(())
    };

    let server = Server::start(&scratch, Some(&format!("vgpu:{}", daemon.vm_socket(VM).display())))?;
    clients(COPY)?;
    let by_card = fs::read(path("disk"))?;
    ensure!(by_card != plain, "the file contains the plain text");
    // After the operator has removed the VM, the device encrypts with the CPU.
    daemon.ctl(&["vm", "remove", VM])?.success()?;
    clients(COPY)?;
    let log = fs::read_to_string(path("log"))?;
    ensure!(log.contains("transforms requests") && log.contains("the card failed"), "{log}");
    ensure!(fs::read(path("disk"))? == by_card, "card and CPU have encrypted differently");
    ensure!(!log.contains("0102030405"), "the key is in the log");
    drop(server);

    // Another server, without a card, replaces the socket and reads the same disk.
    let server = Server::start(&scratch, None)?;
    clients(
        "set -e; rm -f /mnt/copy; nbdcopy 'nbd+unix:///?socket=/mnt/disk.sock' /mnt/copy; cmp /mnt/plain /mnt/copy",
    )?;
    drop(server);
    Ok(())
}
