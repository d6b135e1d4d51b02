//! A guest driver for a CUDA device: a VMM's connection, the control queue, contexts and blobs.

use std::os::fd::{AsFd as _, OwnedFd};
use std::path::Path;
use std::time::{Duration, Instant};

use vmm_glue::client::{Client, MappedRegion, memory_file};

/// TIMEOUT: only a failing test waits this long.
pub const LIMIT: Duration = Duration::from_secs(60);
const CONFIG: u32 = 7;
const MSIX: u32 = 2;
const RAM: u64 = 1 << 20;
const DESCRIPTORS: u64 = 0x1000;
const AVAILABLE: u64 = 0x2000;
const USED: u64 = 0x3000;
const COMMANDS: u64 = 0x1_0000;
const STEP: u64 = 0x400;
const ENTRIES: u64 = 64;
/// Offset of a command's reply from the command, in bytes.
const ANSWER: u64 = 0x200;

/// A guest's driver.
pub struct Driver {
    client: Client,
    ram: OwnedFd,
    pub window: MappedRegion,
    _interrupts: Vec<OwnedFd>,
    available: u16,
    used: u16,
}

impl Driver {
    /// Connects to a device and initializes it.
    pub fn new(socket: &Path) -> Self {
        let mut client = Client::connect(socket).expect("connects");
        client.set_timeout(Some(LIMIT)).expect("set");
        let ram = memory_file(RAM, true).expect("memory");
        client.dma_map(0, RAM, true, Some((ram.as_fd(), 0))).expect("mapped");
        let interrupts = client.attach_irqs(MSIX, 3).expect("interrupts");
        let window = client.map_region(4).expect("mapped");
        let mut driver = Self { client, ram, window, _interrupts: interrupts, available: 0, used: 0 };
        driver.client.write(CONFIG, 4, &6u16.to_le_bytes()).expect("written");
        // Wait for the reset, as drivers do: it may still be in progress after the previous driver has disconnected.
        driver.client.write(0, 0x14, &[0]).expect("written");
        until("the device is reset", || driver.status() == 0);
        let registers: [(u64, &[u8]); 9] = [
            (0x08, &1u32.to_le_bytes()),
            (0x0c, &3u32.to_le_bytes()),
            (0x14, &[0xb]),
            (0x18, &(ENTRIES as u16).to_le_bytes()),
            (0x20, &DESCRIPTORS.to_le_bytes()),
            (0x28, &AVAILABLE.to_le_bytes()),
            (0x30, &USED.to_le_bytes()),
            (0x1c, &[1, 0]),
            (0x14, &[0xf]),
        ];
        for (offset, bytes) in registers {
            driver.client.write(0, offset, bytes).expect("written");
        }
        assert_eq!(driver.status(), 0xf);
        driver
    }

    pub fn status(&mut self) -> u8 {
        let mut status = [0];
        self.client.read(0, 0x14, &mut status).expect("answered");
        status[0]
    }

    fn poke(&self, at: u64, bytes: &[u8]) {
        assert_eq!(rustix::io::pwrite(&self.ram, bytes, at).expect("written"), bytes.len());
    }

    fn peek<const N: usize>(&self, at: u64) -> [u8; N] {
        let mut bytes = [0; N];
        assert_eq!(rustix::io::pread(&self.ram, &mut bytes, at).expect("read"), N);
        bytes
    }

    fn describe(&self, index: u16, address: u64, len: u32, flags: u16) {
        let next = index + 1;
        let parts = [&address.to_le_bytes()[..], &len.to_le_bytes(), &flags.to_le_bytes(), &next.to_le_bytes()];
        self.poke(DESCRIPTORS + u64::from(index) * 16, &parts.concat());
    }

    /// Puts a command into a slot, and rings the doorbell.
    pub fn post(&mut self, slot: u16, command: &[u8]) {
        self.offer(slot, command);
        // Use a posted write, because killing the daemon would lose the reply to any other write.
        self.client.post(0, 0x3000, &[0, 0]).expect("sent");
    }

    /// Puts a command into a slot without ringing the doorbell.
    pub fn offer(&mut self, slot: u16, command: &[u8]) {
        let at = COMMANDS + u64::from(slot) * STEP;
        self.poke(at, command);
        self.describe(slot * 2, at, command.len() as u32, 1);
        self.describe(slot * 2 + 1, at + ANSWER, ANSWER as u32, 2);
        self.poke(AVAILABLE + 4 + u64::from(self.available) % ENTRIES * 2, &(slot * 2).to_le_bytes());
        self.available += 1;
        self.poke(AVAILABLE + 2, &self.available.to_le_bytes());
    }

    /// Returns the slot and the type of the next reply, if one exists.
    pub fn answered(&mut self) -> Option<(u16, u32)> {
        if u16::from_le_bytes(self.peek(USED + 2)) == self.used {
            return None;
        }
        let [a, b, ..] = self.peek::<8>(USED + 4 + u64::from(self.used) % ENTRIES * 8);
        self.used += 1;
        let slot = u16::from_le_bytes([a, b]) / 2;
        Some((slot, u32::from_le_bytes(self.peek(COMMANDS + u64::from(slot) * STEP + ANSWER))))
    }

    /// Waits for the next reply.
    pub fn answer(&mut self) -> (u16, u32) {
        let mut answer = None;
        until("an answer", || {
            answer = self.answered();
            answer.is_some()
        });
        answer.expect("an answer")
    }

    /// Executes a command in slot 0.
    pub fn execute(&mut self, command: &[u8]) {
        self.post(0, command);
        let (slot, kind) = self.answer();
        assert!(slot == 0 && (0x1100..0x1200).contains(&kind), "slot {slot}: {kind:#x}");
    }

    /// Reads a 64-bit word from the window.
    pub fn load(&self, at: u64) -> u64 {
        let mut word = [0; 8];
        self.window.read(at, &mut word).expect("in the window");
        u64::from_le_bytes(word)
    }

    /// Writes a 64-bit word to the window.
    pub fn store(&self, at: u64, value: u64) {
        self.window.write(at, &value.to_le_bytes()).expect("in the window");
    }
}

/// Waits until `holds` returns true.
#[track_caller]
pub fn until(what: &str, mut holds: impl FnMut() -> bool) {
    let begin = Instant::now();
    while !holds() {
        assert!(begin.elapsed() < LIMIT, "{what}");
        std::thread::sleep(Duration::from_millis(1));
    }
}

fn command(kind: u32, context: u32, ring: Option<u8>, body: &[u32]) -> Vec<u8> {
    let mut bytes = [kind.to_le_bytes(), (if ring.is_some() { 3u32 } else { 0 }).to_le_bytes()].concat();
    bytes.extend(1u64.to_le_bytes());
    bytes.extend(context.to_le_bytes());
    bytes.extend([ring.unwrap_or(0), 0, 0, 0]);
    bytes.extend(body.iter().flat_map(|word| word.to_le_bytes()));
    bytes
}

fn halves(value: u64) -> [u32; 2] {
    [value as u32, (value >> 32) as u32]
}

/// Returns a command that creates a context.
pub fn context(id: u32) -> Vec<u8> {
    let mut body = vec![4, 24, u32::from_le_bytes(*b"prog")];
    body.extend([0; 15]);
    command(0x200, id, None, &body)
}

/// Returns a command that destroys a context.
pub fn destroy(id: u32) -> Vec<u8> {
    command(0x201, id, None, &[])
}

/// Returns a command that creates resource `resource` from a context's blob with the given number and kind.
pub fn blob(context: u32, resource: u32, (number, kind): (u32, u32), bytes: u64) -> Vec<u8> {
    let [low, high] = halves(bytes);
    command(0x10c, context, None, &[resource, 2, 1, 0, kind, number, low, high])
}

/// Returns a command that maps a resource at an offset in the window.
pub fn map(resource: u32, offset: u64) -> Vec<u8> {
    let [low, high] = halves(offset);
    command(0x208, 0, None, &[resource, 0, low, high])
}

/// Returns a command that releases a resource.
pub fn unref(resource: u32) -> Vec<u8> {
    command(0x102, 0, None, &[resource, 0])
}

/// Returns a command that waits on a context's ring until a word of a blob has a value.
pub fn wait(context: u32, ring: u8, (blob, offset): (u32, u64), value: u64) -> Vec<u8> {
    let ([low, high], [value_low, value_high]) = (halves(offset), halves(value));
    command(0x207, context, Some(ring), &[24, 0, 2, blob, low, high, value_low, value_high])
}

/// Returns a command that rings the doorbell of a context's worker.
pub fn doorbell(context: u32) -> Vec<u8> {
    command(0x207, context, None, &[4, 0, 1])
}

/// Returns a command that reports the guest process ID of a context's program.
pub fn identify(context: u32, pid: u32) -> Vec<u8> {
    command(0x207, context, None, &[8, 0, 3, pid])
}
