//! Drives a server on the fake hypervisor with steps decoded from arbitrary bytes, for the fuzz target and for a test
//! that runs its seeds.
//!
//! Checks: every request is answered exactly once; the device receives only aligned accesses inside its regions; each
//! memory mapping is unmapped once, and all mappings of a released frame are gone before the answer; the fake
//! hypervisor records no breach; no state remains at the end.

use std::time::Duration;

use vmm_glue::interrupts::IrqCounts;
use vmm_glue::link::{Link, StopHandle};
use vmm_glue::memory::PAGE_SIZE;

use crate::fake::{FakeDomain, FakeSpec, FakeXen};
use crate::model::{BAR0, BAR1, MSI, Model};
use crate::options::XenOptions;
use crate::requests::{Request, kind};
use crate::server::XenServer;
use crate::store::DomainName;

/// Maximum number of steps per input.
const MAX_STEPS: usize = 96;
/// Size of a domain's memory in KiB.
const KIB: u64 = 4096;
/// Values written to the BARs. BAR0 ignores bit 12, so that the BARs are adjacent.
const PLACES: [u64; 2] = [0xf100_1000, 0xf100_2000];

/// Reads bytes in sequence, and zeros once they are exhausted.
struct Bytes<'a>(&'a [u8]);

impl Bytes<'_> {
    fn next<const N: usize>(&mut self) -> [u8; N] {
        let mut bytes = [0; N];
        let (head, tail) = self.0.split_at(N.min(self.0.len()));
        bytes.iter_mut().zip(head).for_each(|(to, from)| *to = *from);
        self.0 = tail;
        bytes
    }

    fn byte(&mut self) -> u8 {
        let [byte] = self.next();
        byte
    }

    /// Returns an address that is often close to a boundary.
    fn address(&mut self) -> u64 {
        let [near, offset, high, low] = self.next();
        let base = match near % 8 {
            0 | 1 => PLACES[0],
            2 => PLACES[0].saturating_add(BAR0).saturating_sub(4),
            3 => PLACES[1].saturating_add(BAR1).saturating_sub(4),
            4 => KIB.saturating_mul(1024).saturating_sub(8),
            5 => 0,
            6 => u64::MAX.saturating_sub(8),
            _ => u64::from_le_bytes(self.next()),
        };
        base.wrapping_add(u64::from(u32::from_le_bytes([offset, low % 16, 0, high / 255])))
    }

    fn request(&mut self) -> Request {
        let [kinds, flags, size, count] = self.next();
        let address = self.address();
        let data = if flags & 1 == 0 { u64::from_le_bytes(self.next()) } else { self.address() };
        Request {
            address: if kinds % 4 == 1 { u64::from(XenOptions::SLOT) << 35 | address & 0xff } else { address },
            data,
            count: match count {
                0..200 => u32::from(count % 20),
                _ => u32::from(count).saturating_mul(0x0101_0101),
            },
            size: match size {
                0..240 => 1u32.wrapping_shl(u32::from(size % 4)),
                _ => u32::from(size % 17),
            },
            kind: match kinds % 4 {
                0 | 2 => kind::MEMORY,
                1 => kind::PCI_CONFIG,
                _ => kinds / 4,
            },
            data_is_address: flags & 1 != 0,
            read: flags & 2 != 0,
            backwards: flags & 4 != 0,
        }
    }
}

/// Stops a server on drop, even during a panic. Otherwise, joining its thread would block forever.
struct Stops<'a>(&'a StopHandle);

impl Drop for Stops<'_> {
    fn drop(&mut self) {
        self.0.stop();
    }
}

/// Decodes the steps of an input, and runs them on a server.
///
/// # Panics
/// Panics if a check fails.
pub fn run(bytes: &[u8]) {
    let xen = FakeXen::default();
    let link = Link::new(IrqCounts { intx: 1, msi: 1, ..IrqCounts::default() }).expect("a link");
    let stop = StopHandle::new().expect("a handle");
    let (mut device, seen) = Model::new(&link);
    let options = XenOptions { spin: Duration::ZERO, ..XenOptions::new(DomainName::Name("guest".to_owned())) };
    let mut server = XenServer::with(options, xen.hypervisor(), xen.store());
    std::thread::scope(|scope| {
        let stops = Stops(&stop);
        let thread = scope.spawn(|| server.run(&link, &mut device, &stop).map_err(|error| error.to_string()));
        let mut bytes = Bytes(bytes);
        let mut number = 1;
        let mut domain = begin(&xen, number);
        for _ in 0..MAX_STEPS {
            // If the server has exited, waiting for it would fail.
            if bytes.0.is_empty() || thread.is_finished() {
                break;
            }
            if matches!(step(&mut bytes, &domain, &link), Next::Domain) {
                domain.destroy();
                domain.wait_left();
                number = number.saturating_add(1);
                domain = begin(&xen, number);
            }
        }
        drop(stops);
        let ended = thread.join().expect("the server does not panic");
        assert_eq!(ended, Ok(()));
    });
    let seen = seen.lock();
    assert!(seen.mapped.is_empty() && seen.came == seen.went, "{seen:?}");
    assert!(link.memory().snapshot().regions().is_empty());
    assert_eq!(xen.breaches(), [""; 0]);
}

/// The action that follows a step.
enum Next {
    Step,
    /// Continue with another domain.
    Domain,
}

fn begin(xen: &FakeXen, number: u16) -> FakeDomain {
    let domain = xen.create(FakeSpec { cpus: 2, kib: KIB, spare: 2, ..FakeSpec::new(number, "guest") });
    domain.wait_served();
    domain.config_write(0x10, u32::try_from(PLACES[0]).unwrap_or(0));
    domain.config_write(0x14, u32::try_from(PLACES[1]).unwrap_or(0));
    domain.config_write(0x04, 6);
    domain
}

fn step(bytes: &mut Bytes<'_>, domain: &FakeDomain, link: &Link) -> Next {
    match bytes.byte() {
        0..100 => {
            let cpu = usize::from(bytes.byte() % 2);
            let request = bytes.request();
            let answer = domain.request(cpu, &request).expect("an answer");
            // The answer to a request that is not an access is ignored.
            let is_access = !matches!(request.kind, kind::INVALIDATE | kind::TIME_OFFSET);
            if is_access && request.read && !request.data_is_address && request.count > 4096 {
                assert_eq!(answer, u64::MAX, "{request:?}");
            }
        }
        100..130 => {
            let [offset, value @ ..] = bytes.next::<5>();
            domain.config_write(u64::from(offset & 0xfc), u32::from_le_bytes(value));
        }
        130..150 => {
            let frame = u64::from(bytes.byte()).wrapping_mul(5) % (KIB / 4);
            let frames = frame..frame.saturating_add(u64::from(bytes.byte() % 9));
            domain.give_back(frames.clone());
            let table = link.memory().snapshot();
            for frame in frames {
                assert!(table.find(frame.saturating_mul(PAGE_SIZE)).is_none(), "frame {frame} is still mapped");
            }
        }
        150..160 => {
            let frame = u64::from(bytes.byte()).wrapping_mul(5) % (KIB / 4);
            domain.populate(frame..frame.saturating_add(u64::from(bytes.byte() % 9)).min(KIB / 4));
        }
        160..190 => {
            let request = Request { address: u64::from(bytes.byte()) << 10, kind: kind::MEMORY, ..bytes.request() };
            // Xen buffers only writes of these sizes.
            if matches!(request.size, 1 | 2 | 4 | 8) {
                let _ = domain.buffer(&request);
            }
        }
        190..200 => domain.config_write(MSI, u32::from(bytes.byte() & 1) << 16),
        // Use both virtual CPUs at the same time.
        200..225 => {
            let requests = [bytes.request(), bytes.request()];
            for (cpu, request) in requests.iter().enumerate() {
                domain.put(cpu, request).expect("a server");
            }
            for cpu in 0..requests.len() {
                domain.wait_answer(cpu).expect("an answer");
            }
        }
        225..240 => {
            let at = usize::from(bytes.byte()).saturating_mul(16);
            domain.junk(true, at, &bytes.next::<8>());
        }
        240..250 => {
            // Use a slot beyond those of the domain's virtual CPUs.
            let at = usize::from(bytes.byte() % 126).saturating_mul(32).saturating_add(64);
            domain.junk(false, at, &bytes.next::<32>());
        }
        _ => return Next::Domain,
    }
    Next::Step
}
