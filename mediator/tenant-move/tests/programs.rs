//! Tests moves between two cards of the fake driver, with real owner processes and real programs. At each request to an
//! owner, an owner or the program is killed, or the daemon, which this test emulates, exits.

use std::cell::{Cell, RefCell};
use std::collections::BTreeMap;
use std::io::{BufRead as _, BufReader, Write as _};
use std::os::unix::fs::symlink;
use std::path::{Path, PathBuf};
use std::process::{Child, ChildStdin, ChildStdout, Command, Stdio};
use std::time::Duration;

use config::{CardSpec, Config};
use cuda_control::{Answer, Card as View, Request, Tenant, TenantView};
use tenant_move::{Carried, Failure, Owner, Plan, Trouble, carry_over};

/// Returns the path of a file in Cargo's build folder.
fn built(name: &str) -> PathBuf {
    let own = std::env::current_exe().expect("this file");
    let path = own.parent().and_then(Path::parent).expect("a folder in cargo's build folder").join(name);
    assert!(path.exists(), "{} is missing: `cargo xtask test --suite cuda` builds it", path.display());
    path
}

/// A folder with two cards, the library, and the driver, under the names that programs load.
struct Rig(tempfile::TempDir);

impl Rig {
    fn new() -> Self {
        let folder = tempfile::tempdir_in("/dev/shm").expect("a folder");
        for (name, library) in [("plain", "libcuda_fake.so"), ("shim", "libcuda.so")] {
            std::fs::create_dir(folder.path().join(name)).expect("a folder");
            for file in ["libcuda.so.1", "libnvidia-ml.so.1"] {
                symlink(built(library), folder.path().join(name).join(file)).expect("a link");
            }
        }
        std::fs::create_dir_all(folder.path().join("tenants/a")).expect("a folder");
        std::fs::create_dir_all(folder.path().join("tenants/b")).expect("a folder");
        Self(folder)
    }

    fn path(&self) -> &Path {
        self.0.path()
    }

    fn command(&self, program: &Path, library: &str) -> Command {
        let mut command = Command::new(program);
        command
            .env("FAKE_CUDA_FOLDER", self.path().join("card"))
            .env("FAKE_CUDA_MIB", "256")
            .env("FAKE_CUDA_CONTEXT_MIB", "2")
            .env("FAKE_CUDA_CARDS", "2")
            .env("LD_LIBRARY_PATH", self.path().join(library))
            .env("GPU_MEDIATOR_CUDA_DRIVER", self.path().join("plain/libcuda.so.1"))
            .env("GPU_MEDIATOR_CUDA_LOG", "1")
            .env_remove("CUDA_VISIBLE_DEVICES");
        command.stdin(Stdio::piped()).stdout(Stdio::piped());
        command
    }

    fn config(&self) -> Config {
        let card = |name: &str, at: u32| {
            format!(
                "[[card]]\nname = \"{name}\"\nkind = \"cuda\"\nvram_mib = 64\nmemory.host_mib = 128\n\
                 memory.quanta.mode = \"off\"\ncuda.driver = \"{}\"\ncuda.device = \"{at}\"\ncuda.chunk_mib = 2\n\
                 cuda.host_ready_mib = 4\n",
                self.path().join("plain/libcuda.so.1").display()
            )
        };
        let tenants = "[[tenant]]\nname = \"a\"\ncard = \"one\"\nvram_mib = 64\n\
                       [[tenant]]\nname = \"b\"\ncard = \"two\"\nvram_mib = 64\n";
        Config::parse(&(card("one", 0) + &card("two", 1) + tenants), "test").expect("valid")
    }

    /// Starts a tenant's program, which computes on its memory and checks the results.
    fn program(&self, tenant: &str, more: &[&str]) -> Program {
        self.program_that_sees(2, tenant, more)
    }

    /// Starts a program whose driver sees this many cards, as in a container with their device files.
    fn program_that_sees(&self, cards: u32, tenant: &str, more: &[&str]) -> Program {
        let mut command = self.command(&built("cuda-program"), "shim");
        let socket = self.path().join("tenants").join(tenant).join("cuda.sock");
        command.env("GPU_MEDIATOR_CUDA_SOCKET", socket).env("FAKE_CUDA_CARDS", cards.to_string());
        command.args(["live", "--mib", "8"]).args(more);
        let mut child = command.spawn().expect("starts");
        let (input, output) = (child.stdin.take(), BufReader::new(child.stdout.take().expect("piped")));
        let mut program = Program { child, input, output };
        program.buffers();
        program
    }
}

struct Program {
    child: Child,
    input: Option<ChildStdin>,
    output: BufReader<ChildStdout>,
}

impl Program {
    fn line(&mut self) -> String {
        let mut line = String::new();
        self.output.read_line(&mut line).expect("readable");
        line.trim().to_owned()
    }

    /// Returns the number of buffers in the program's next line of output.
    fn buffers(&mut self) -> u64 {
        let line = self.line();
        let mut words = line.split(' ');
        assert_eq!(words.next(), Some("step"), "{line}");
        words.nth(1).and_then(|count| count.parse().ok()).expect("a number")
    }

    /// Makes the program allocate another 4 MiB, and waits until it has computed with this memory.
    fn grow(&mut self) {
        let before = self.buffers();
        writeln!(self.input.as_mut().expect("open"), "more").expect("written");
        while self.buffers() <= before {}
    }

    fn end(mut self) {
        self.input = None;
        let last = loop {
            let line = self.line();
            if !line.starts_with("step") {
                break line;
            }
        };
        assert!(self.child.wait().expect("ends").success() && last.starts_with("held"), "{last}");
    }

    fn kill(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

impl Drop for Program {
    fn drop(&mut self) {
        self.kill();
    }
}

struct Process {
    child: Child,
    input: ChildStdin,
    output: BufReader<ChildStdout>,
}

impl Process {
    fn exchange(&mut self, line: &impl serde::Serialize) -> Option<Answer> {
        let text = serde_json::to_string(line).expect("JSON");
        writeln!(self.input, "{text}").ok()?;
        let mut answer = String::new();
        self.output.read_line(&mut answer).ok()?;
        serde_json::from_str(&answer).ok()
    }
}

/// The owner of a card. Like the daemon, restarts an owner that has exited, with its tenants.
struct Card<'a> {
    rig: &'a Rig,
    spec: CardSpec,
    cards: Vec<CardSpec>,
    process: RefCell<Option<Process>>,
    tenants: RefCell<BTreeMap<String, Tenant>>,
}

impl<'a> Card<'a> {
    fn start(rig: &'a Rig, spec: &CardSpec, cards: &[CardSpec], tenants: BTreeMap<String, Tenant>) -> Self {
        let (spec, cards) = (spec.clone(), cards.to_vec());
        let card = Self { rig, spec, cards, process: RefCell::default(), tenants: RefCell::new(tenants) };
        card.restart();
        card
    }

    fn restart(&self) {
        self.kill();
        let mut child = self.rig.command(&built("cuda-owner"), "plain").arg("work").spawn().expect("starts");
        let (input, output) = (child.stdin.take().expect("piped"), child.stdout.take().expect("piped"));
        let mut process = Process { child, input, output: BufReader::new(output) };
        let ready = process.exchange(&owner_settings::settings(&self.spec, &self.cards, self.rig.path()));
        assert!(matches!(ready, Some(Answer::Ready { .. })), "{ready:?}");
        for tenant in self.tenants.borrow().values() {
            assert_eq!(process.exchange(&Request::Add(tenant.clone())), Some(Answer::Done));
        }
        *self.process.borrow_mut() = Some(process);
    }

    fn kill(&self) {
        if let Some(mut process) = self.process.borrow_mut().take() {
            let _ = process.child.kill();
            let _ = process.child.wait();
        }
    }

    fn view(&self) -> View {
        loop {
            match self.ask(Request::View { since_ns: 0 }) {
                Ok(Answer::View(view)) => return *view,
                Ok(other) => panic!("{other:?}"),
                Err(_) => {}
            }
        }
    }

    /// Returns the number of a tenant's programs, and the size of its card memory and of its host memory in MiB.
    fn tenant(&self, name: &str) -> Option<(usize, u64, u64)> {
        let view = self.view();
        let named = |(_, tenant): &(_, &TenantView)| tenant.name == name;
        let (id, tenant) = view.tenants.iter().map(|(id, tenant)| (*id, tenant)).find(named)?;
        let memory = view.memory.summary.vms.get(&id).copied().unwrap_or_default();
        Some((tenant.programs.len(), 2 * u64::from(memory.placed), 2 * u64::from(memory.host)))
    }
}

impl Owner for Card<'_> {
    fn ask(&self, request: Request) -> Result<Answer, Trouble> {
        let answer = self.process.borrow_mut().as_mut().and_then(|process| process.exchange(&request));
        let Some(answer) = answer else {
            self.restart();
            return Err(Trouble::Absent("the owner has exited".to_owned()));
        };
        let mut tenants = self.tenants.borrow_mut();
        match (request, answer) {
            (_, Answer::Failed(why)) => return Err(Trouble::Refused(why)),
            (Request::Add(tenant), Answer::Done) => drop(tenants.insert(tenant.name.clone(), tenant)),
            (Request::Arrive { name, .. }, Answer::Done) => {
                tenants.get_mut(&name).into_iter().for_each(|tenant| tenant.arrives = false);
            }
            (Request::Remove { name, .. }, answer) => {
                tenants.remove(&name);
                return Ok(answer);
            }
            (_, answer) => return Ok(answer),
        }
        Ok(Answer::Done)
    }
}

impl Drop for Card<'_> {
    fn drop(&mut self) {
        self.kill();
    }
}

/// An owner whose requests are reported before and after they are sent.
struct Watched<'a> {
    card: &'a Card<'a>,
    name: &'static str,
    /// Called with the name of a request, for example `to.Arrive`, with false before and true after it. Returns false
    /// to fail all further requests, as if the daemon had exited.
    report: &'a dyn Fn(&str, bool) -> bool,
}

impl Owner for Watched<'_> {
    fn ask(&self, request: Request) -> Result<Answer, Trouble> {
        let kind = format!("{request:?}");
        let kind = format!("{}.{}", self.name, kind.split(['(', ' ']).next().unwrap_or_default());
        let ended = || Err(Trouble::Refused("the daemon has exited".to_owned()));
        if !(self.report)(&kind, false) {
            return ended();
        }
        let answer = self.card.ask(request);
        if (self.report)(&kind, true) { answer } else { ended() }
    }
}

struct World<'a> {
    rig: &'a Rig,
    config: Config,
    cards: [Card<'a>; 2],
}

impl<'a> World<'a> {
    /// Starts both owners. Tenant `a` is on card `on`, and tenant `b` on the second card.
    fn start(rig: &'a Rig, on: usize) -> Self {
        let config = rig.config();
        let cards = [0, 1].map(|at| {
            let spec = &config.cards[at];
            let mut tenants = BTreeMap::new();
            for (tenant, of) in [(0, on), (1, 1)] {
                if of == at {
                    let tenant = owner_settings::tenant(&config.tenants[tenant], spec, rig.path(), None, (None, None));
                    tenants.insert(tenant.name.clone(), tenant);
                }
            }
            Card::start(rig, spec, &config.cards, tenants)
        });
        Self { rig, config, cards }
    }

    /// Returns the index of tenant `a`'s card.
    fn place(&self) -> usize {
        usize::from(!self.cards[0].tenants.borrow().contains_key("a"))
    }

    /// Moves tenant `a` to the other card.
    fn carry(&self, report: &dyn Fn(&str, bool) -> bool) -> Result<Carried, Failure> {
        let (here, there) = (self.place(), 1 - self.place());
        let [from, to] =
            [(here, "from"), (there, "to")].map(|(at, name)| Watched { card: &self.cards[at], name, report });
        let tenant = |at: usize| {
            owner_settings::tenant(&self.config.tenants[0], &self.config.cards[at], self.rig.path(), None, (None, None))
        };
        carry_over(Plan { from: &from, to: &to, here: &tenant(here), there: &tenant(there) })
    }

    /// Waits until tenant `a` has `programs` programs and at least `least_mib` MiB of memory, all of it on the tenant's
    /// card.
    fn until_settled(&self, programs: usize, least_mib: u64) {
        let (here, there) = (&self.cards[self.place()], &self.cards[1 - self.place()]);
        // TIMEOUT: only a failing test waits this long.
        for _ in 0..1200 {
            let (at, elsewhere) = (here.tenant("a"), there.tenant("a"));
            if elsewhere.is_none()
                && at.is_some_and(|(count, card, host)| {
                    count == programs && card >= least_mib && host == 0 && (programs > 0 || card == 0)
                })
            {
                assert!(here.view().strangers.is_empty() && there.view().strangers.is_empty());
                return;
            }
            std::thread::sleep(Duration::from_millis(50));
        }
        panic!("tenant a: {:?}, on the other card {:?}", here.tenant("a"), there.tenant("a"));
    }
}

#[test]
fn program_moves_back_and_forth_next_to_a_neighbour() {
    let rig = Rig::new();
    let world = World::start(&rig, 0);
    let (mut program, mut neighbour) = (rig.program("a", &[]), rig.program("b", &[]));
    program.grow();
    for round in 1..=4 {
        let carried = world.carry(&|_, _| true).expect("it moves");
        assert_eq!((carried.programs, world.place()), (1, round % 2));
        program.grow();
        neighbour.grow();
        world.until_settled(1, 12 + 4 * round as u64);
    }
    // A program that starts later uses the tenant's card.
    let mut late = rig.program("a", &[]);
    late.grow();
    late.end();
    program.end();
    neighbour.end();
    world.until_settled(0, 0);
}

#[test]
fn programs_without_a_card_cannot_move_and_continue() {
    let rig = Rig::new();
    let world = World::start(&rig, 0);
    let (mut own, mut other) = (rig.program("a", &["--own"]), rig.program("a", &[]));
    let Err(Failure::Stays(why)) = world.carry(&|_, _| true) else { panic!("it has moved") };
    assert!(why.starts_with("program `") && why.contains("it maps its memory itself"), "{why}");
    own.grow();
    other.grow();
    own.end();
    // The other card accepts no contexts.
    std::fs::write(rig.path().join("card/card-1/broken"), "").expect("written");
    let Err(Failure::Stays(why)) = world.carry(&|_, _| true) else { panic!("it has moved") };
    assert!(why.contains("cuCheckpointProcessRestore"), "{why}");
    assert_eq!(world.place(), 0);
    other.grow();
    world.until_settled(1, 12);
    std::fs::remove_file(rig.path().join("card/card-1/broken")).expect("removed");
    world.carry(&|_, _| true).expect("it moves");
    other.grow();
    other.end();
}

#[test]
fn program_that_cannot_use_the_other_card_stays() {
    let rig = Rig::new();
    let world = World::start(&rig, 0);
    let (mut other, mut limited) = (rig.program("a", &[]), rig.program_that_sees(1, "a", &[]));
    let Err(Failure::Stays(why)) = world.carry(&|kind, _| kind != "to.Add") else { panic!("it has moved") };
    assert!(why.starts_with("program `cuda-program` (process ") && why.contains("does not show it that card"), "{why}");
    limited.grow();
    limited.end();
    world.until_settled(1, 8);
    // The driver restores the program on the other card, but imports no memory there. The second time, the import fails
    // long after the restore.
    for (delay_ms, chunks) in [("", 12), ("100", 16)] {
        std::fs::write(rig.path().join("card/card-1/unimportable"), delay_ms).expect("written");
        let Err(Failure::Stays(why)) = world.carry(&|_, _| true) else { panic!("it has moved") };
        assert!(why.contains("cannot import its memory on that card: CUDA error 3"), "{why}");
        assert_eq!(world.place(), 0);
        other.grow();
        world.until_settled(1, chunks);
    }
    std::fs::remove_file(rig.path().join("card/card-1/unimportable")).expect("removed");
    let carried = world.carry(&|_, _| true).expect("it moves");
    assert!(carried.phases.restore > Duration::ZERO && carried.pause >= carried.phases.restore, "{carried:?}");
    other.grow();
    other.end();
}

/// Requests of a move. A process is killed, or the daemon exits, before or after each of them.
const STEPS: [&str; 7] =
    ["from.MayLeave", "to.Add", "from.Leave", "to.Arrive", "from.Remove", "to.Arrivals", "to.View"];

#[test]
fn killed_owner_at_each_step_leaves_the_program_running() {
    let rig = Rig::new();
    let world = World::start(&rig, 0);
    let (mut program, mut neighbour) = (rig.program("a", &[]), rig.program("b", &[]));
    for step in STEPS {
        for (victim, after) in [(0, false), (0, true), (1, false), (1, true)] {
            let before = world.place();
            let done = Cell::new(false);
            let result = world.carry(&|kind, is_after| {
                if kind == step && is_after == after && !done.replace(true) {
                    world.cards[if victim == 0 { before } else { 1 - before }].kill();
                }
                true
            });
            assert!(done.get(), "{step}");
            let stays = matches!(result, Err(Failure::Stays(_)));
            assert_eq!(world.place() == before, stays, "{step} {victim} {after}: {result:?}");
            program.grow();
            world.until_settled(1, 8);
            neighbour.grow();
            if program.buffers() > 10 {
                program.end();
                neighbour.end();
                (program, neighbour) = (rig.program("a", &[]), rig.program("b", &[]));
            }
        }
    }
    program.end();
    neighbour.end();
}

#[test]
fn ended_daemon_at_each_step_leaves_the_program_running() {
    let rig = Rig::new();
    let mut world = World::start(&rig, 0);
    for step in STEPS {
        for after in [false, true] {
            let mut program = rig.program("a", &[]);
            let (before, ended) = (world.place(), Cell::new(false));
            let result = world.carry(&|kind, is_after| {
                if kind == step && is_after == after {
                    ended.set(true);
                }
                !ended.get()
            });
            assert!(ended.get() && result.is_err(), "{step}: {result:?}");
            // The next daemon still assigns the tenant to the previous card.
            drop(world);
            world = World::start(&rig, before);
            program.grow();
            world.until_settled(1, 12);
            program.end();
        }
    }
}

#[test]
fn killed_program_at_each_step_does_not_hold_up_others() {
    let rig = Rig::new();
    let world = World::start(&rig, 0);
    for step in STEPS {
        for after in [false, true] {
            let (program, mut other) = (RefCell::new(rig.program("a", &[])), rig.program("a", &[]));
            let before = world.place();
            let result = world.carry(&|kind, is_after| {
                if kind == step && is_after == after {
                    program.borrow_mut().kill();
                }
                true
            });
            assert!(result.is_ok(), "{step} {after}: {result:?}");
            assert_ne!(world.place(), before);
            other.grow();
            world.until_settled(1, 12);
            other.end();
            world.until_settled(0, 0);
        }
    }
}
