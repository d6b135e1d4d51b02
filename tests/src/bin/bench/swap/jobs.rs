//! Jobs that go through a working set again and again, for [`thrash`](super::thrash). What a pass takes on the card and from host
//! memory is modelled, so nothing here depends on how fast kernels are executed.

use std::time::Duration;

use anyhow::{Context, Result, ensure};
use rig::Rig;
use rig::driver::{At, Channel, Driver, M2MF, PAGE, m2mf_copy, object, pattern};
use tests::light::{LightGpu, MIB, guest, wait};
use vram::Limits;
use workloads::{Buffer, Gpu, Grid, Module, Params, Place};

/// Bytes of a piece.
const PIECE: u64 = 256 << 10;
/// Pieces of a job's working set; copies have one that is spare.
const PIECES: u64 = 32;
/// First byte of guests' VRAM that the driver itself has nothing at.
const FIRST: u64 = 4 * MIB;
/// Address of the set for the GPU.
const VA: u64 = 0x100_0000;
/// Passes that are under way together, so that it matters less how late this machine wakes the job.
const QUEUED: u64 = 5;
/// Bytes that a thread of the kernel has: what a card moves at a time, and what is charged for it.
const LINE: u64 = 128;
/// Words of them that it counts up.
const WORDS: usize = 4;

/// Counts four words of each 128 bytes up; a thread for each 128. It has the set's address as a parameter, so that no submission names the memory.
const BUMP: &str = "
.equ    COUNT   0x20
.equ    SET     0x28
.kernel bump
        .params 16
        S2R     R0, SR_CTAID.X
        S2R     R1, SR_NTID.X
        S2R     R2, SR_TID.X
        IMAD.U32.U32 R0, R0, R1, R2
        ISETP.GE.U32.AND P0, PT, R0, c[0][COUNT]
  @P0   EXIT
        MOV32I  R1, 128
        IMAD.U32.U32 R2.CC, R0, R1, c[0][SET]
        IMAD.U32.U32.HI.X R3, R0, R1, c[0][SET+4]
        LD.E.128 R4, [R2]
        IADD    R4, R4, 1
        IADD    R5, R5, 1
        IADD    R6, R6, 1
        IADD    R7, R7, 1
        ST.E.128 [R2], R4
        EXIT
";

/// Way in which a job reaches its memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Reach {
    /// By copies, whose both sides its submissions name: each piece is handed on to the next.
    Copies,
    /// By a kernel with pointers.
    Pointers,
}

/// Amount of work: bursts of passes, with a time after each in which it computes on the CPU and the GPU has nothing of it.
#[derive(Clone, Copy, Debug)]
pub struct Amount {
    /// Bursts.
    pub bursts: u64,
    /// Passes of each.
    pub passes: u64,
    /// Time after each. It sleeps: whose CPU a VM has is not what is measured.
    pub cpu: Duration,
}

impl Amount {
    /// Passes without a break.
    pub const fn passes(passes: u64) -> Self {
        Self { bursts: 1, passes, cpu: Duration::ZERO }
    }

    /// All passes.
    pub const fn all(self) -> u64 {
        self.bursts * self.passes
    }
}

/// A job and its guest.
pub enum Job {
    /// By copies.
    Copies(Copies),
    /// By pointers.
    Pointers(Box<Pointers>),
}

impl Job {
    /// A job in a VM of its own, whose set is filled.
    pub fn new(rig: &Rig, vm: u32, reach: Reach) -> Result<Self> {
        Ok(match reach {
            Reach::Copies => Self::Copies(Copies::new(rig, vm)?),
            Reach::Pointers => Self::Pointers(Box::new(Pointers::new(rig, vm)?)),
        })
    }

    /// Does its work.
    pub fn run(&mut self, amount: Amount) -> Result<()> {
        for _ in 0..amount.bursts {
            match self {
                Self::Copies(job) => job.run(amount.passes)?,
                Self::Pointers(job) => job.run(amount.passes)?,
            }
            if !amount.cpu.is_zero() {
                std::thread::sleep(amount.cpu);
            }
        }
        Ok(())
    }

    /// Looks at all bytes, after so many passes.
    pub fn verify(&mut self, passes: u64) -> Result<()> {
        match self {
            Self::Copies(job) => job.verify(passes),
            Self::Pointers(job) => job.verify(passes),
        }
    }
}

/// A job that hands pieces on.
pub struct Copies {
    driver: Driver,
    channel: Channel,
    seed: u32,
}

impl Copies {
    fn new(rig: &Rig, vm: u32) -> Result<Self> {
        let bytes = (PIECES + 1) * PIECE;
        let mut driver = guest(rig, vm, (FIRST + bytes).div_ceil(MIB).max(16), Limits::default())?;
        let channel = driver.channel(1);
        driver.map(channel.space, VA, At::Vram(FIRST), bytes / PAGE);
        let seed = vm + 50;
        for page in 0..PIECES * PIECE / PAGE {
            driver.guest.vram_write(FIRST + page * PAGE, &pattern(seed, page));
        }
        Ok(Self { driver, channel, seed })
    }

    fn run(&mut self, passes: u64) -> Result<()> {
        let hand_on = |from: u64, to: u64| m2mf_copy(VA + from * PIECE, VA + to * PIECE, PIECE as u32);
        // The last goes to the spare place, each other to the next, and what is spare to the first.
        let order = (0..=PIECES).rev().map(|to| if to == 0 { (PIECES, 0) } else { (to - 1, to) });
        let words = [object(M2MF)].into_iter().chain(order.map(|(from, to)| hand_on(from, to)));
        let words = words.collect::<Vec<_>>().concat();
        for pass in 1..=passes {
            self.driver.submit(&mut self.channel, &words);
            if pass % QUEUED == 0 || pass == passes {
                wait(&mut self.driver, &self.channel)?;
            }
        }
        Ok(())
    }

    fn verify(&self, passes: u64) -> Result<()> {
        for piece in 0..PIECES {
            let began_as = (piece + PIECES - passes % PIECES) % PIECES;
            for page in 0..PIECE / PAGE {
                let mut found = vec![0; PAGE as usize];
                self.driver.guest.vram_read(FIRST + piece * PIECE + page * PAGE, &mut found);
                let expected = pattern(self.seed, began_as * PIECE / PAGE + page);
                ensure!(found == expected, "seed {}: page {page} of piece {piece} holds something else", self.seed);
            }
        }
        Ok(())
    }
}

/// A job whose kernel counts all words up.
pub struct Pointers {
    gpu: LightGpu,
    module: Module,
    set: Buffer,
    seed: u32,
}

impl Pointers {
    fn new(rig: &Rig, vm: u32) -> Result<Self> {
        let bytes = PIECES * PIECE;
        let mut gpu = LightGpu::new(guest(rig, vm, 24, Limits::default())?)?;
        let program = sm20::assemble(BUMP).ok().context("the kernel does not assemble")?;
        let module = gpu.load(&program)?;
        let set = gpu.allocate(Place::Vram, bytes)?;
        let seed = vm + 70;
        for page in 0..bytes / PAGE {
            gpu.upload(set, page * PAGE, &pattern(seed, page))?;
        }
        Ok(Self { gpu, module, set, seed })
    }

    fn run(&mut self, passes: u64) -> Result<()> {
        let count = (self.set.bytes / LINE) as u32;
        let params = Params::new().word(count).buffer(self.set);
        for pass in 1..=passes {
            self.gpu.launch(self.module, "bump", Grid::line(count, 512), &params, &[self.set])?;
            if pass % QUEUED == 0 || pass == passes {
                self.gpu.finish()?;
            }
        }
        Ok(())
    }

    fn verify(&mut self, passes: u64) -> Result<()> {
        for page in 0..self.set.bytes / PAGE {
            let mut found = vec![0; PAGE as usize];
            self.gpu.download(self.set, page * PAGE, &mut found)?;
            let bumped = |(at, word): (usize, &[u8; 4])| {
                let passes = if at % (LINE as usize / 4) < WORDS { passes as u32 } else { 0 };
                u32::from_le_bytes(*word).wrapping_add(passes).to_le_bytes()
            };
            let expected: Vec<u8> =
                pattern(self.seed, page).as_chunks().0.iter().enumerate().flat_map(bumped).collect();
            ensure!(found == expected, "seed {}: page {page} holds something else", self.seed);
        }
        Ok(())
    }
}
