//! Measures the cost of VM exits without a guest kernel: a guest with five instructions reads or writes a device
//! register. Either this process or a server behind a `mediatord` socket serves the access. The program also measures
//! the cost of lending RAM to such a server.
//!
//! `exits SOCKET ROUNDS COUNT` needs KVM. `exits lend SOCKET MIB PAGES ROUNDS` does not need KVM; PAGES is `small` or
//! `huge` (2 MiB pages, which must be reserved on the host). Each round prints one line of `name=value` pairs; the
//! values are in nanoseconds.
//!
//! Sources: AMD64 manual volume 3 (instruction encodings), and `Documentation/virt/kvm/api.rst` in the kernel.
#![expect(unsafe_code, reason = "gives a guest its memory")]
// UNSAFETY: one call registers a mapping with KVM. The mapping outlives the guest.

use std::error::Error;
use std::os::fd::{AsFd, OwnedFd};
use std::path::Path;
use std::process::ExitCode;
use std::time::{Duration, Instant};

use kvm_bindings::kvm_userspace_memory_region;
use kvm_ioctls::{Kvm, VcpuExit, VcpuFd, VmFd};
use rustix::fs::{MemfdFlags, ftruncate, memfd_create};
use vm_memory::{FileOffset, MmapRegion, VolatileMemory};
use vmm_glue::client::Client;

type Result<T> = std::result::Result<T, Box<dyn Error>>;

/// Size of the guest's memory, in bytes.
const MEMORY: usize = 0x4000;
const CODE: usize = 0x1000;
const TSS: usize = 0xfffb_d000;
/// Guest-physical address of the device's registers, in a range without memory on PCs.
const DEVICE: u64 = 0xd_0000;
/// Offset of a register that a vGPU emulates without access to the card.
const REGISTER: u64 = 0x1100;
/// Guest-physical address of the lent RAM.
const LENT_AT: u64 = 1 << 30;
const MIB: u64 = 1 << 20;
/// Timeout for a response.
const ANSWER_TIMEOUT: Duration = Duration::from_secs(300);

/// Direction of an access.
#[derive(Clone, Copy)]
enum Access {
    Read,
    Write,
}

/// Server that handles the accesses.
enum Answer<'a> {
    /// This process.
    Alone,
    /// Server behind a socket.
    Server(&'a mut Client),
}

impl Answer<'_> {
    fn read(&mut self, offset: u64, data: &mut [u8]) -> Result<()> {
        match self {
            Self::Alone => data.fill(0),
            Self::Server(client) => client.read(0, offset, data)?,
        }
        Ok(())
    }

    fn write(&mut self, offset: u64, data: &[u8]) -> Result<()> {
        match self {
            Self::Alone => Ok(()),
            Self::Server(client) => Ok(client.write(0, offset, data)?),
        }
    }
}

/// Returns a guest program that transfers EAX to or from [BX], ECX times, and then halts.
fn program(access: Access) -> [u8; 8] {
    let [prefix, opcode, operand] = match access {
        Access::Read => [0x66, 0x8b, 0x07],
        Access::Write => [0x66, 0x89, 0x07],
    };
    // `DEC ECX`, `JNZ` to the start, `HLT`.
    [prefix, opcode, operand, 0x66, 0x49, 0x75, 0xf9, 0xf4]
}

/// A guest in real mode. Its memory is dropped last.
struct Guest {
    cpu: VcpuFd,
    _vm: VmFd,
    memory: MmapRegion,
}

impl Guest {
    fn new(kvm: &Kvm) -> Result<Self> {
        let vm = kvm.create_vm()?;
        // Some processors need three pages for real mode. Place them below a PC's firmware, where this guest has no
        // memory.
        vm.set_tss_address(TSS)?;
        let memory = MmapRegion::new(MEMORY)?;
        let region = kvm_userspace_memory_region {
            slot: 0,
            guest_phys_addr: 0,
            memory_size: MEMORY as u64,
            userspace_addr: memory.as_ptr().addr() as u64,
            flags: 0,
        };
        // SAFETY: the mapping is at least this large, and outlives the guest.
        unsafe { vm.set_user_memory_region(region)? };
        let cpu = vm.create_vcpu(0)?;
        let mut sregs = cpu.get_sregs()?;
        (sregs.cs.base, sregs.cs.selector) = (0, 0);
        (sregs.ds.base, sregs.ds.selector) = (DEVICE, (DEVICE >> 4) as u16);
        cpu.set_sregs(&sregs)?;
        Ok(Self { cpu, _vm: vm, memory })
    }

    /// Runs `count` accesses. Returns the average time per access in ns.
    fn run(&mut self, access: Access, count: u32, answer: &mut Answer<'_>) -> Result<f64> {
        self.memory.as_volatile_slice().subslice(CODE, 8)?.copy_from(&program(access));
        let mut regs = self.cpu.get_regs()?;
        (regs.rip, regs.rbx, regs.rcx, regs.rflags) = (CODE as u64, REGISTER, count.into(), 2);
        self.cpu.set_regs(&regs)?;
        let (began, mut seen) = (Instant::now(), 0);
        loop {
            match self.cpu.run()? {
                VcpuExit::MmioRead(at, data) => answer.read(at - DEVICE, data)?,
                VcpuExit::MmioWrite(at, data) => answer.write(at - DEVICE, data)?,
                VcpuExit::Hlt if seen == count => break,
                other => return Err(format!("the guest stopped after {seen} of {count} accesses: {other:?}").into()),
            }
            seen += 1;
        }
        Ok(began.elapsed().as_nanos() as f64 / f64::from(count))
    }
}

/// Measures exits, alternating between this process and the server at `socket`.
fn exits(socket: &Path, rounds: u32, count: u32) -> Result<()> {
    let kvm = Kvm::new().map_err(|error| format!("/dev/kvm: {error}; load the modules kvm-amd or kvm-intel"))?;
    let mut guest = Guest::new(&kvm)?;
    let mut client = Client::connect(socket)?;
    client.set_timeout(Some(ANSWER_TIMEOUT))?;
    for _ in 0..rounds {
        let mut line = String::new();
        for (name, access) in [("read", Access::Read), ("write", Access::Write)] {
            let alone = guest.run(access, count, &mut Answer::Alone)?;
            let served = guest.run(access, count, &mut Answer::Server(&mut client))?;
            line.push_str(&format!("{name}_alone={alone:.0} {name}_served={served:.0} "));
        }
        println!("{}", line.trim_end());
    }
    Ok(())
}

/// Allocates guest RAM and touches each of its pages.
fn ram(bytes: u64, huge: bool) -> Result<OwnedFd> {
    let kind = if huge { MemfdFlags::HUGETLB | MemfdFlags::HUGE_2MB } else { MemfdFlags::empty() };
    let file = memfd_create("ram", MemfdFlags::CLOEXEC | kind)?;
    ftruncate(&file, bytes)?;
    let step = if huge { 2 * MIB } else { 4096 };
    let mapped = MmapRegion::<()>::from_file(FileOffset::new(file.try_clone()?.into(), 0), usize::try_from(bytes)?)?;
    for at in (0..bytes).step_by(usize::try_from(step)?) {
        mapped.as_volatile_slice().subslice(usize::try_from(at)?, 1)?.copy_from(&[1_u8]);
    }
    Ok(file)
}

/// Measures how long a client waits for the server when it lends RAM and when it withdraws the RAM.
fn lend(socket: &Path, mib: u64, huge: bool, rounds: u32) -> Result<()> {
    let file = ram(mib * MIB, huge)?;
    let mut client = Client::connect(socket)?;
    client.set_timeout(Some(ANSWER_TIMEOUT))?;
    // Enable memory space and bus mastering, because a card without them does not access memory.
    client.write(7, 4, &6_u16.to_le_bytes())?;
    for _ in 0..rounds {
        let began = Instant::now();
        client.dma_map(LENT_AT, mib * MIB, true, Some((file.as_fd(), 0)))?;
        let mapped = began.elapsed();
        let began = Instant::now();
        client.dma_unmap(LENT_AT, mib * MIB)?;
        println!("map={} unmap={}", mapped.as_nanos(), began.elapsed().as_nanos());
    }
    Ok(())
}

fn main() -> ExitCode {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let words: Vec<&str> = arguments.iter().map(String::as_str).collect();
    let number = |text: &str| text.parse::<u32>().ok().filter(|number| *number != 0);
    let done = match *words.as_slice() {
        ["lend", socket, mib, pages @ ("small" | "huge"), rounds] => match (number(mib), number(rounds)) {
            (Some(mib), Some(rounds)) => lend(Path::new(socket), mib.into(), pages == "huge", rounds),
            _ => Err("MIB and ROUNDS must be at least 1".into()),
        },
        [socket, rounds, count] => match (number(rounds), number(count)) {
            (Some(rounds), Some(count)) => exits(Path::new(socket), rounds, count),
            _ => Err("ROUNDS and COUNT must be at least 1".into()),
        },
        _ => Err("usage: exits SOCKET ROUNDS COUNT, or exits lend SOCKET MIB small|huge ROUNDS".into()),
    };
    match done {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("exits: {error}");
            ExitCode::FAILURE
        }
    }
}
