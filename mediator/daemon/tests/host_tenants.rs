//! Tests host processes that are tenants of a card without a VM: gdev's backend `vgpu` connects through the daemon's
//! sockets.

mod support;

use std::path::Path;

use gdev::{Context, Copy, Error, Grid, Image, Params, Place as Memory, Target};
use gdev_crypt::cipher::{CardMin, Cipher};
use gdev_crypt::key::Key;
use gdev_crypt::tables::Direction;
use rustix::process::Signal;
use support::Place;
use workloads::{NAMES, Options, by_name};

const CARD: &str = "[[card]]\nname = \"card0\"\nkind = \"simgpu\"\nvram_mib = 256\n";
const VMS: &str = "[[vm]]\nname = \"a\"\ncard = \"card0\"\nvram_mib = 64\nchannels = 4\n\
    [[vm]]\nname = \"b\"\ncard = \"card0\"\nvram_mib = 64\n";

/// Two kernels: one adds a number to each word, and one stores to an address that a parameter selects.
const KERNELS: &str = "
.kernel add
.params 16
    S2R R2, SR_TID.X
    MOV32I R1, 4
    IMAD.U32.U32 R4.CC, R2, R1, c[0][0x20]
    IMAD.U32.U32.HI.X R5, R2, R1, c[0][0x24]
    LD.E R3, [R4]
    IADD R3, R3, c[0][0x28]
    ST.E [R4], R3
    EXIT
.kernel store
.params 8
    MOV R0, c[0][0x20]
    MOV R1, c[0][0x24]
    MOV32I R2, 1
    ST.E [R0], R2
    EXIT
";

fn open(socket: &Path) -> Result<Context, Error> {
    gdev::open(&Target::Vgpu(socket.to_owned()))
}

fn kernels() -> sm20::Program {
    sm20::assemble(KERNELS).expect("a program")
}

#[test]
fn all_workloads_run_in_a_host_process() {
    let place = Place::new(&format!("{CARD}{VMS}"));
    let running = place.start(&mut place.daemon());
    let mut context = open(&place.path("a.sock")).expect("a context");
    for name in NAMES {
        let workload = by_name(name, Options::default()).expect("a workload");
        let report = workloads::run(&*workload, &mut context).unwrap_or_else(|error| panic!("{name}: {error:#}"));
        assert!(report.verified > 0 || *name == "nop", "nothing of {name} was verified");
    }
    drop(context);
    running.end(Signal::TERM);
}

#[test]
fn copies_of_all_sizes_arrive_with_and_without_overlap() {
    let place = Place::new(&format!("{CARD}{VMS}"));
    let running = place.start(&mut place.daemon());
    let mut context = open(&place.path("a.sock")).expect("a context");
    let memory = context.allocate(Memory::Vram, 3 << 20).expect("memory");
    let mut random = fastrand::Rng::with_seed(7);
    for overlap in [true, false] {
        let tuning = gdev::Tuning { piece_bytes: 256 << 10, overlap, ..context.tuning() };
        context.tune(tuning).expect("limits");
        for bytes in [1, 3, 64, 1023, 4096, 4097, 70_000, 256 << 10, 1_000_001] {
            let offset = random.u64(0..1 << 20);
            let data: Vec<u8> = (0..bytes).map(|_| random.u8(..)).collect();
            context.write(memory, offset, &data).expect("a write");
            let mut back = vec![0; bytes];
            context.read(memory, offset, &mut back).expect("a read");
            assert!(back == data, "{bytes} bytes at {offset}, overlap {overlap}");
        }
    }
    let ram = context.allocate(Memory::Ram, 4096).expect("pinned memory");
    context.write(memory, 0, &[5; 4096]).expect("a write");
    let copy = Copy { from: memory, from_offset: 0, to: ram, to_offset: 0, bytes: 4096 };
    let fence = context.copy(&copy).expect("a copy");
    context.wait(fence).expect("its end");
    let mut back = [0; 4096];
    context.read(ram, 0, &mut back).expect("a read");
    assert_eq!(back, [5; 4096]);
    drop(context);
    running.end(Signal::TERM);
}

#[test]
fn lost_context_does_not_disturb_another() {
    let place = Place::new(&format!("{CARD}{VMS}"));
    let running = place.start(&mut place.daemon());
    let socket = place.path("a.sock");
    let mut good = open(&socket).expect("a context");
    let memory = good.allocate(Memory::Vram, 128).expect("memory");
    good.write(memory, 0, &[0; 128]).expect("a write");
    let module = good.load(Image::Sm20(&kernels())).expect("a module");
    for round in 0..3 {
        let mut bad = open(&socket).expect("another context");
        let shared = good.share(memory).expect("a reference");
        let theirs = bad.reference(&shared).expect("the memory");
        let module = bad.load(Image::Sm20(&kernels())).expect("a module");
        bad.launch(module, "add", Grid::line(32, 32), &Params::new().buffer(theirs).word(1).word(0), &[theirs])
            .expect("a launch");
        bad.finish().expect("its end");
        bad.launch(module, "store", Grid::line(1, 1), &Params::new().address(0x77_0000_0000), &[]).expect("a launch");
        let error = bad.finish().expect_err("the address is not mapped");
        assert!(matches!(&error, Error::Lost(why) if why.contains("0x7700000000")), "round {round}: {error}");
        assert!(matches!(bad.finish(), Err(Error::Lost(_))));
    }
    good.launch(module, "add", Grid::line(32, 32), &Params::new().buffer(memory).word(1).word(0), &[memory])
        .expect("a launch");
    let mut words = [0; 128];
    good.read(memory, 0, &mut words).expect("a read");
    assert!(words.chunks(4).all(|word| word == [4, 0, 0, 0]), "{words:?}");
    drop(good);
    running.end(Signal::TERM);
}

#[test]
fn freed_memory_is_used_again_and_stale_handles_are_refused() {
    let place = Place::new(&format!("{CARD}{VMS}"));
    let running = place.start(&mut place.daemon());
    let mut context = open(&place.path("b.sock")).expect("a context");
    for _ in 0..20 {
        let memory = context.allocate(Memory::Vram, 20 << 20).expect("memory");
        let pinned = context.allocate(Memory::Ram, 1 << 20).expect("pinned memory");
        context.write(memory, 0, &[1; 8192]).expect("a write");
        context.free(memory).expect("memory of this context");
        context.free(pinned).expect("memory of this context");
        assert!(matches!(context.write(memory, 0, &[1]), Err(Error::Memory(_))));
        assert!(matches!(context.free(memory), Err(Error::Memory(_))));
        context.finish().expect("the end");
    }
    let error = context.allocate(Memory::Vram, 1 << 30).expect_err("more than the VM has");
    assert!(matches!(error, Error::Allocation { place: Memory::Vram, .. }), "{error}");
    let image = Image::Cuda(b".version 7.0");
    assert!(matches!(context.load(image), Err(Error::Image(_))));
    drop(context);
    running.end(Signal::TERM);
}

#[test]
fn wrong_sockets_and_missing_channels_are_named() {
    let place = Place::new(&format!("{CARD}{VMS}"));
    let running = place.start(&mut place.daemon());
    let error = open(&place.path("c.sock")).expect_err("no such socket").to_string();
    assert!(error.contains("c.sock") && error.contains("mediatorctl vm list"), "{error}");
    let other = vmm_glue::client::Client::connect(&place.path("b.sock")).expect("a client");
    let error = open(&place.path("b.sock")).expect_err("another client").to_string();
    assert!(error.contains("has another client"), "{error}");
    drop(other);
    let contexts: Vec<Context> = (0..4).map(|_| open(&place.path("a.sock")).expect("a context")).collect();
    let error = open(&place.path("a.sock")).expect_err("four channels are in use");
    assert!(error.to_string().contains("see `channels` in its configuration"), "{error}");
    drop(contexts);
    let mut again = open(&place.path("a.sock")).expect("channels are free again");
    // The VM is removed while the context exists.
    assert!(place.ctl(&["vm", "remove", "a"]).status.success());
    let memory = again.allocate(Memory::Vram, 1 << 20);
    assert!(matches!(memory, Err(Error::Lost(_))), "{memory:?}");
    drop(again);
    running.end(Signal::TERM);
}

#[test]
fn sectors_encrypted_on_the_card_equal_the_cpu_which_takes_over() {
    let place = Place::new(&format!("{CARD}{VMS}"));
    let running = place.start(&mut place.daemon());
    let key = || Key::new(std::array::from_fn(|index| (index * 7) as u8)).expect("a key");
    let target = Target::Vgpu(place.path("a.sock"));
    let on_card = Cipher::new(key(), Some(target), CardMin::Bytes(8192)).expect("a cipher");
    let on_cpu = Cipher::new(key(), None, CardMin::Measured).expect("a cipher");
    let mut random = fastrand::Rng::with_seed(3);
    let mut compare = |bytes: usize| {
        let plain: Vec<u8> = (0..bytes).map(|_| random.u8(..)).collect();
        let sector = random.u64(0..1 << 40);
        let (mut one, mut other) = (plain.clone(), plain.clone());
        on_card.run(Direction::Encrypt, sector, &mut one);
        on_cpu.run(Direction::Encrypt, sector, &mut other);
        assert!(one == other, "{bytes} bytes from sector {sector}");
        on_card.run(Direction::Decrypt, sector, &mut one);
        assert!(one == plain, "{bytes} bytes from sector {sector}");
    };
    for bytes in [512, 8192, 512 * 17, 100 << 10, 5 << 20] {
        compare(bytes);
    }
    let counts = on_card.counts();
    assert_eq!((counts.cpu_bytes, counts.card_failures), (1024, 0));
    assert!(place.ctl(&["vm", "remove", "a"]).status.success());
    compare(64 << 10);
    compare(64 << 10);
    let counts = on_card.counts();
    assert_eq!((counts.cpu_bytes, counts.card_failures), (1024 + (256 << 10), 1));
    running.end(Signal::TERM);
}
