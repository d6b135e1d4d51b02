//! Tests of host processes that use a card as tenants without a VM: gdev's backend `vgpu` connects to the daemon's
//! sockets.

mod support;

use std::io::{BufRead, BufReader};
use std::path::Path;

use gdev::{Context, Copy, Error, Grid, Image, Params, Place as Memory, Segment, SegmentRequest, Target};
use gdev_crypt::cipher::{CardMin, Cipher};
use gdev_crypt::key::Key;
use gdev_crypt::tables::Direction;
use rustix::process::Signal;
use support::Place;
use workloads::{NAMES, Options, by_name};

const CARD: &str = "[[card]]\nname = \"card0\"\nkind = \"simgpu\"\nvram_mib = 256\n";
const VMS: &str = "[[vm]]\nname = \"a\"\ncard = \"card0\"\nvram_mib = 64\nchannels = 4\n\
    [[vm]]\nname = \"b\"\ncard = \"card0\"\nvram_mib = 64\n";

/// Two kernels: one adds a number to each word, and one stores to an address given as a parameter.
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
        assert!(report.verified > 0 || *name == "nop", "no output of {name} was verified");
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
    let error = open(&place.path("c.sock")).expect_err("the socket does not exist").to_string();
    assert!(error.contains("c.sock") && error.contains("mediatorctl vm list"), "{error}");
    let other = vmm_glue::client::Client::connect(&place.path("b.sock")).expect("a client");
    let error = open(&place.path("b.sock")).expect_err("another client").to_string();
    assert!(error.contains("has another client"), "{error}");
    drop(other);
    let contexts: Vec<Context> = (0..4).map(|_| open(&place.path("a.sock")).expect("a context")).collect();
    let error = open(&place.path("a.sock")).expect_err("all four channels are in use");
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

/// Returns the configuration of VMs: `a` and `b` in one sharing group, `c` in another, and `d` without the paravirtual
/// interface.
fn sharing() -> String {
    let vm = |name: &str, more: &str| {
        format!("[[vm]]\nname = \"{name}\"\ncard = \"card0\"\nvram_mib = 32\nchannels = 4\n{more}")
    };
    let offered = |group: &str| format!("paravirtual = {{ offered = true, group = \"{group}\" }}\n");
    [CARD.into(), vm("a", &offered("team")), vm("b", &offered("team")), vm("c", &offered("others")), vm("d", "")]
        .concat()
}

/// Key of the segment that the VMs of these tests share.
const KEY: u64 = 0x7365_676d;
/// Size of this segment in bytes.
const SEGMENT_BYTES: u64 = 64 << 10;

/// Returns a request for a segment shared within the group.
fn of_group(key: u64) -> SegmentRequest {
    SegmentRequest { group: true, ..SegmentRequest::find(key, SEGMENT_BYTES) }
}

fn pattern(seed: u64) -> Vec<u8> {
    let mut random = fastrand::Rng::with_seed(seed);
    (0..SEGMENT_BYTES).map(|_| random.u8(..)).collect()
}

/// Returns the contents of a segment.
fn contents(context: &mut Context, segment: gdev::Memory) -> Vec<u8> {
    let mut bytes = vec![0; SEGMENT_BYTES as usize];
    context.read(segment, 0, &mut bytes).expect("a read");
    bytes
}

/// Returns the error number of a rejected request.
fn refusal<T: std::fmt::Debug>(result: Result<T, Error>) -> Option<i32> {
    match result {
        Err(Error::Driver { source, .. }) => source.raw_os_error(),
        other => panic!("not rejected by the mediator: {other:?}"),
    }
}

#[test]
fn tenants_of_a_group_share_segments_as_the_owner_permits() {
    const NOT_FOUND: Option<i32> = Some(2);
    const DENIED: Option<i32> = Some(13);
    const TOO_LARGE: Option<i32> = Some(34);
    let place = Place::new(&sharing());
    let running = place.start(&mut place.daemon());
    let [mut owner, mut peer, mut other] = ["a", "b", "c"].map(|vm| open(&place.path(&format!("{vm}.sock"))).unwrap());
    assert_eq!(refusal(peer.segment(of_group(KEY))), NOT_FOUND);
    let segment = owner.segment(SegmentRequest { create: true, ..of_group(KEY) }).expect("a segment");
    let here = owner.attach(segment, false).expect("the owner's segment");
    assert_eq!(contents(&mut owner, here), vec![0; SEGMENT_BYTES as usize], "a new segment is zeroed");
    owner.write(here, 0, &pattern(1)).expect("a write");
    owner.finish().expect("its end");

    // The peer finds the segment by its key. It can read the segment, but not write or remove it.
    assert_eq!(peer.segment(of_group(KEY)).expect("the segment"), segment);
    assert_eq!(refusal(peer.attach(segment, false)), DENIED);
    assert_eq!(refusal(peer.remove(segment)), DENIED);
    let there = peer.attach(segment, true).expect("the segment, for reading");
    assert!(contents(&mut peer, there) == pattern(1));
    assert_eq!(owner.attached(segment).expect("a number"), 2);

    // Guessed keys and IDs are not found, and a request for more bytes than the segment has is rejected.
    assert_eq!(refusal(peer.segment(of_group(KEY + 1))), NOT_FOUND);
    assert_eq!(refusal(peer.segment(SegmentRequest::find(KEY, SEGMENT_BYTES))), NOT_FOUND);
    assert_eq!(refusal(other.segment(of_group(KEY))), NOT_FOUND);
    for id in 0..=segment.id + 8 {
        assert_eq!(refusal(other.attach(Segment { id, bytes: SEGMENT_BYTES }, true)), NOT_FOUND, "segment {id}");
    }
    assert_eq!(refusal(peer.segment(SegmentRequest { bytes: SEGMENT_BYTES + 1, ..of_group(KEY) })), TOO_LARGE);
    let larger = peer.attach(Segment { bytes: SEGMENT_BYTES + 1, ..segment }, true);
    assert!(matches!(larger, Err(Error::Range { .. })), "{larger:?}");

    // A write to a segment attached as read-only terminates only the writing context.
    let mut bad = open(&place.path("b.sock")).expect("another context");
    let theirs = bad.attach(segment, true).expect("the segment, for reading");
    assert_eq!(owner.attached(segment).expect("a number"), 3);
    bad.write(theirs, 0, &pattern(2)).expect("a submission");
    assert!(matches!(bad.finish(), Err(Error::Lost(_))));
    drop(bad);
    assert_eq!(
        owner.attached(segment).expect("the segment exists"),
        2,
        "a terminated context has detached its segments"
    );
    assert!(contents(&mut peer, there) == pattern(1));

    // A segment has no CPU address, and cannot be freed or referenced.
    assert!(matches!(peer.free(there), Err(Error::Unsupported { .. })));
    assert!(matches!(peer.share(there), Err(Error::Unsupported { .. })));
    drop((owner, peer, other));
    running.end(Signal::TERM);
}

#[test]
fn detached_segments_are_unreachable() {
    let place = Place::new(&sharing());
    let running = place.start(&mut place.daemon());
    let [mut owner, mut peer] = ["a", "b"].map(|vm| open(&place.path(&format!("{vm}.sock"))).unwrap());
    let request = SegmentRequest { create: true, group_writes: true, ..of_group(KEY) };
    let segment = owner.segment(request).expect("a segment");
    let here = owner.attach(segment, false).expect("the owner's segment");
    let there = peer.attach(segment, false).expect("the peer's segment");
    peer.write(there, 0, &pattern(3)).expect("a write");
    // Detaching waits for the write.
    peer.detach(there).expect("an attached segment");
    assert!(contents(&mut owner, here) == pattern(3));
    assert!(matches!(peer.detach(there), Err(Error::Memory(_))));
    assert!(matches!(peer.write(there, 0, &[1]), Err(Error::Memory(_))));
    // The address is no longer mapped.
    let module = peer.load(Image::Sm20(&kernels())).expect("a module");
    peer.launch(module, "store", Grid::line(1, 1), &Params::new().address(there.address), &[]).expect("a launch");
    assert!(matches!(peer.finish(), Err(Error::Lost(_))));
    assert!(contents(&mut owner, here) == pattern(3));
    // A removed segment has no key, but exists as long as it is attached.
    drop(peer);
    let mut peer = open(&place.path("b.sock")).expect("a context");
    let there = peer.attach(segment, true).expect("the segment");
    owner.remove(segment).expect("the owner's segment");
    assert!(peer.segment(of_group(KEY)).is_err() && owner.segment(of_group(KEY)).is_err());
    owner.detach(here).expect("an attached segment");
    assert!(contents(&mut peer, there) == pattern(3));
    peer.detach(there).expect("an attached segment");
    assert!(peer.attach(segment, true).is_err(), "the segment is freed");
    drop((owner, peer));
    running.end(Signal::TERM);
}

#[test]
fn vgpu_without_paravirtual_interface_says_how_to_get_segments() {
    let place = Place::new(&sharing());
    let running = place.start(&mut place.daemon());
    let [mut with, mut without] = ["a", "d"].map(|vm| open(&place.path(&format!("{vm}.sock"))).unwrap());
    assert!(with.has_segments() && !without.has_segments());
    let error = without.segment(SegmentRequest::create(1, 4096)).expect_err("no segments").to_string();
    assert!(error.contains("`paravirtual.offered`"), "{error}");
    // A VM's private segments need no group, and count towards the VM's limit.
    let mut second = open(&place.path("a.sock")).expect("another context");
    let segment = with.segment(SegmentRequest::create(1, SEGMENT_BYTES)).expect("a segment");
    let (here, there) = (with.attach(segment, false).expect("it"), second.attach(segment, false).expect("it"));
    with.write(here, 0, &pattern(4)).expect("a write");
    with.finish().expect("its end");
    assert!(contents(&mut second, there) == pattern(4));
    assert_eq!(refusal(with.segment(SegmentRequest::create(2, 64 << 20))), Some(28), "more than `segments_mib`");
    drop((with, without, second));
    running.end(Signal::TERM);
}

/// Environment variable that passes the socket to the process that [`killed_owner_leaves_its_segment_to_the_peers`]
/// kills.
const OWNER: &str = "GDEV_TEST_OWNER";

#[test]
fn killed_owner_leaves_its_segment_to_the_peers() {
    if let Some(socket) = std::env::var_os(OWNER) {
        own_a_segment(Path::new(&socket));
    }
    let place = Place::new(&sharing());
    let running = place.start(&mut place.daemon());
    let mut owner = std::process::Command::new(std::env::current_exe().expect("the path of this program"))
        .args(["killed_owner_leaves_its_segment_to_the_peers", "--exact", "--nocapture"])
        .env(OWNER, place.path("a.sock"))
        .stdout(std::process::Stdio::piped())
        .spawn()
        .map(support::Service)
        .expect("a process");
    let output = BufReader::new(owner.0.stdout.take().expect("a pipe"));
    assert!(output.lines().map_while(Result::ok).any(|line| line.contains("owned")), "the owner exited early");
    let mut peer = open(&place.path("b.sock")).expect("a context");
    let segment = peer.segment(of_group(KEY)).expect("the owner's segment");
    let there = peer.attach(segment, true).expect("the segment, for reading");
    assert_eq!(peer.attached(segment).expect("a number"), 2);
    owner.0.kill().expect("a running process");
    owner.0.wait().expect("its end");

    // When the process exits, its vGPU is reset: the segment is detached and loses its key. The peer keeps the segment.
    let next = (0..30).find_map(|_| open(&place.path("a.sock")).ok());
    let mut next = next.expect("the next process of the VM");
    assert_eq!(peer.attached(segment).expect("a number"), 1);
    assert!(contents(&mut peer, there) == pattern(5));
    assert!(peer.segment(of_group(KEY)).is_err() && next.segment(of_group(KEY)).is_err());
    // The key can be reused for a new segment, which contains none of the old data.
    let again = next.segment(SegmentRequest { create: true, ..of_group(KEY) }).expect("another segment");
    let here = next.attach(again, false).expect("the segment");
    assert!(again != segment && contents(&mut next, here) == vec![0; SEGMENT_BYTES as usize]);
    assert_eq!(peer.segment(of_group(KEY)).expect("the new segment"), again);
    peer.detach(there).expect("an attached segment");
    assert!(peer.attach(segment, true).is_err(), "the old segment is freed");
    drop((next, peer));
    running.end(Signal::TERM);
}

/// Creates a segment for the peers, and waits to be killed.
fn own_a_segment(socket: &Path) -> ! {
    let mut context = open(socket).expect("a context");
    let segment = context.segment(SegmentRequest { create: true, ..of_group(KEY) }).expect("a segment");
    let memory = context.attach(segment, false).expect("the segment");
    context.write(memory, 0, &pattern(5)).expect("a write");
    context.finish().expect("its end");
    println!("owned");
    loop {
        std::thread::park();
    }
}
