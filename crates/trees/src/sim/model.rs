//! A file system that loses what was not made durable, a log on flash, and a registry.

use std::collections::{BTreeMap, BTreeSet};

use crate::large::{self, BLOCK};

/// What data is counted in: a block has four.
pub const CELL: u64 = 1024;
const CELLS: usize = (BLOCK / CELL) as usize;
const MOST: u64 = 1 << 40;

pub type Ino = u64;
type Name = &'static [u8];
type Cells = [u32; CELLS];

/// Why a step was not taken.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Stop {
    /// The power is gone.
    Crash,
    /// There is no such name.
    NoEnt,
}

#[derive(Clone, Copy, Debug)]
pub enum Node {
    Dir(usize),
    File(Ino),
}

impl Node {
    pub fn dir(&self) -> usize {
        match self {
            Node::Dir(dir) => *dir,
            Node::File(ino) => panic!("{ino} is a file"),
        }
    }

    pub fn file(&self) -> Ino {
        match self {
            Node::File(ino) => *ino,
            Node::Dir(dir) => panic!("{dir} is a directory"),
        }
    }
}

/// xorshift64*: small, and the same everywhere.
#[derive(Clone)]
pub struct Dice(u64);

impl Dice {
    pub fn new(seed: u64) -> Dice {
        Dice(seed.wrapping_mul(0x9E37_79B9_7F4A_7C15) | 1)
    }

    pub fn roll(&mut self, sides: u64) -> u64 {
        self.0 ^= self.0 >> 12;
        self.0 ^= self.0 << 25;
        self.0 ^= self.0 >> 27;
        (self.0.wrapping_mul(0x2545_F491_4F6C_DD1D) >> 24) % sides
    }

    pub fn chance(&mut self, percent: u64) -> bool {
        self.roll(100) < percent
    }
}

/// What a file holds.
#[derive(Clone, Debug, Default)]
pub struct Content {
    pub len: u64,
    cells: BTreeMap<u64, u32>,
    /// Its maker gave it what he wanted.
    pub dressed: bool,
    /// Another one after each change, as a time of change is.
    stamp: u64,
}

#[derive(Clone, Copy, Debug)]
enum FileOp {
    Cell(u64, u32),
    Len(u64),
    Dress,
}

impl Content {
    fn apply(&mut self, op: FileOp, stamp: u64) {
        match op {
            // What is written behind the end went there when there was no end.
            FileOp::Cell(at, _) if at >= self.len => return,
            FileOp::Cell(at, value) => {
                self.cells.insert(at, value);
            }
            FileOp::Len(len) => {
                self.len = len;
                self.cells.split_off(&len);
            }
            FileOp::Dress => self.dressed = true,
        }
        self.stamp = stamp;
    }

    fn cell(&self, at: u64) -> u32 {
        self.cells.get(&at).copied().unwrap_or(0)
    }
}

#[derive(Clone, Debug, Default)]
struct Inode {
    now: Content,
    durable: Content,
    pending: Vec<(FileOp, u64)>,
    /// How much of its length whoever has it open knows to be durable.
    synced: u64,
}

#[derive(Clone, Copy, Debug)]
enum DirOp {
    Set(Name, Ino),
    Del(Name),
    Move(Name, Name),
    /// The new name of a rename from another directory; its number.
    Come(Name, Ino, u64),
    /// The old name of one.
    Go(Name, u64),
}

type Names = BTreeMap<Name, Ino>;

fn apply(names: &mut Names, op: DirOp) {
    match op {
        DirOp::Set(name, ino) | DirOp::Come(name, ino, _) => {
            names.insert(name, ino);
        }
        DirOp::Del(name) | DirOp::Go(name, _) => {
            names.remove(name);
        }
        DirOp::Move(from, to) => {
            if let Some(ino) = names.remove(from) {
                names.insert(to, ino);
            }
        }
    }
}

#[derive(Clone, Debug, Default)]
struct Dir {
    now: Names,
    durable: Names,
    pending: Vec<DirOp>,
}

/// A block in the log, newer than the file or equal to it.
#[derive(Clone, Copy, Debug)]
struct Copied {
    cells: Cells,
    dirty: bool,
}

type Log = BTreeMap<(Ino, u64), Copied>;

#[derive(Clone, Copy, Debug)]
struct Record {
    bound: u64,
    /// The file looks so.
    promise: Option<(u64, u64)>,
}

#[derive(Clone)]
pub struct Model {
    dice: Dice,
    dirs: Vec<Dir>,
    /// So many of them, the last ones, clients do not see.
    hidden: usize,
    inodes: BTreeMap<Ino, Inode>,
    last_ino: Ino,
    stamp: u64,
    /// Renames into another directory whose new name is durable.
    come: BTreeSet<u64>,
    log: Log,
    log_durable: Log,
    log_pending: Vec<((Ino, u64), Cells)>,
    /// Written back, and not durable there: with what.
    written: BTreeMap<(Ino, u64), Cells>,
    records: BTreeMap<Ino, Record>,
    /// Files that are disks now, and whether anything may be written back.
    open: BTreeMap<Ino, bool>,
    steps_left: u32,
    /// The new directory of a rename from one into another.
    pub crossing: Option<usize>,
    /// Nobody else closes it.
    pub busy: Option<Ino>,
    pub promise_early: bool,
    pub promise_stays: bool,
    pub crashes: u64,
}

fn block(at: u64) -> u64 {
    at / BLOCK * BLOCK
}

impl Model {
    pub fn new(dirs: usize, seed: u64) -> Model {
        Model {
            dice: Dice::new(seed),
            dirs: (0..dirs).map(|_| Dir::default()).collect(),
            hidden: 0,
            inodes: BTreeMap::new(),
            last_ino: 0,
            stamp: 0,
            come: BTreeSet::new(),
            log: Log::new(),
            log_durable: Log::new(),
            log_pending: Vec::new(),
            written: BTreeMap::new(),
            records: BTreeMap::new(),
            open: BTreeMap::new(),
            steps_left: u32::MAX,
            crossing: None,
            busy: None,
            promise_early: false,
            promise_stays: false,
            crashes: 0,
        }
    }

    pub fn crash_in(&mut self, steps: u32) {
        self.steps_left = steps;
    }

    /// A step is about to be taken; meanwhile others do theirs.
    pub fn step(&mut self) -> Result<(), Stop> {
        if self.steps_left == 0 {
            return Err(Stop::Crash);
        }
        if self.steps_left < u32::MAX {
            self.steps_left -= 1;
        }
        while self.dice.chance(35) {
            self.background();
        }
        Ok(())
    }

    fn background(&mut self) {
        let open: Vec<Ino> = self.open.keys().copied().collect();
        let any = self.dice.roll(open.len().max(1) as u64) as usize;
        match (self.dice.roll(8), open.get(any)) {
            (0..=2, Some(ino)) => self.write_back(*ino),
            (3, Some(ino)) => self.flush_origin(*ino),
            (4, Some(ino)) => self.close(*ino),
            (5, _) => self.flush_log(),
            (6, _) => {
                let dir = self.dice.roll(self.dirs.len() as u64) as usize;
                if self.may_settle(dir) {
                    let op = self.dirs[dir].pending.remove(0);
                    self.settle_name(dir, op);
                }
            }
            (_, Some(ino)) => self.settle(*ino),
            _ => {}
        }
    }

    fn inode(&mut self, ino: Ino) -> &mut Inode {
        self.inodes.entry(ino).or_default()
    }

    fn change(&mut self, ino: Ino, op: FileOp) {
        self.stamp += 1;
        let stamp = self.stamp;
        let inode = self.inode(ino);
        inode.now.apply(op, stamp);
        inode.pending.push((op, stamp));
    }

    // Names.

    pub fn find(&self, dir: usize, name: &[u8]) -> Option<Ino> {
        self.dirs[dir].now.get(name).copied()
    }

    pub fn next_ino(&mut self) -> Ino {
        self.last_ino += 1;
        self.last_ino
    }

    fn name_change(&mut self, dir: usize, op: DirOp) {
        let dir = &mut self.dirs[dir];
        apply(&mut dir.now, op);
        dir.pending.push(op);
    }

    pub fn set_name(&mut self, dir: usize, name: &[u8], ino: Ino) {
        self.name_change(dir, DirOp::Set(known(name), ino));
    }

    pub fn make(&mut self, dir: usize, name: &[u8], ino: Ino) {
        self.inodes.insert(ino, Inode::default());
        self.set_name(dir, name, ino);
    }

    pub fn dress(&mut self, ino: Ino) {
        self.change(ino, FileOp::Dress);
    }

    pub fn unlink(&mut self, dir: usize, name: &[u8]) {
        self.name_change(dir, DirOp::Del(known(name)));
    }

    pub fn rename(&mut self, from: (usize, &[u8]), to: (usize, &[u8])) {
        if from.0 == to.0 {
            return self.name_change(from.0, DirOp::Move(known(from.1), known(to.1)));
        }
        if let Some(ino) = self.find(from.0, from.1) {
            self.stamp += 1;
            let number = self.stamp;
            self.name_change(to.0, DirOp::Come(known(to.1), ino, number));
            self.name_change(from.0, DirOp::Go(known(from.1), number));
        }
    }

    /// True if the first change of a directory may become durable of its own accord: of two directories the new one first.
    fn may_settle(&self, dir: usize) -> bool {
        match self.dirs[dir].pending.first() {
            Some(DirOp::Go(_, number)) => self.come.contains(number),
            Some(_) => true,
            None => false,
        }
    }

    fn settle_name(&mut self, dir: usize, op: DirOp) {
        if let DirOp::Come(_, _, number) = op {
            self.come.insert(number);
        }
        apply(&mut self.dirs[dir].durable, op);
    }

    /// One directory, whatever belongs to its changes in others.
    pub fn sync_names(&mut self, dir: usize) {
        for op in std::mem::take(&mut self.dirs[dir].pending) {
            self.settle_name(dir, op);
        }
    }

    pub fn names(&self) -> BTreeMap<(usize, Name), Ino> {
        let seen = self.dirs.len() - self.hidden;
        let each = self.dirs.iter().enumerate().take(seen);
        each.flat_map(|(dir, names)| names.now.iter().map(move |(n, i)| ((dir, *n), *i)))
            .collect()
    }

    pub fn named_files(&self) -> BTreeSet<Ino> {
        self.names().into_values().collect()
    }

    pub fn has_name(&self, ino: Ino) -> bool {
        self.named_files().contains(&ino)
    }

    // Files.

    pub fn file(&self, ino: Ino) -> &Content {
        &self.inodes[&ino].now
    }

    pub fn set_len(&mut self, ino: Ino, len: u64) {
        self.change(ino, FileOp::Len(len));
        let inode = self.inode(ino);
        inode.synced = inode.synced.min(len);
    }

    /// The kernel writes a file back of its own accord.
    fn settle(&mut self, ino: Ino) {
        let inode = self.inode(ino);
        inode.pending.clear();
        inode.durable = inode.now.clone();
    }

    pub fn sync(&mut self, ino: Ino) {
        self.settle(ino);
        self.believe_synced(ino);
    }

    pub fn believe_synced(&mut self, ino: Ino) {
        let inode = self.inode(ino);
        inode.synced = inode.now.len;
    }

    pub fn synced(&self, ino: Ino) -> u64 {
        self.inodes[&ino].synced
    }

    /// As clients see it.
    pub fn read(&self, ino: Ino, at: u64) -> u32 {
        let file = self.file(ino);
        if at >= file.len {
            return 0;
        }
        match self.log.get(&(ino, block(at))) {
            Some(copied) => copied.cells[((at % BLOCK) / CELL) as usize],
            None => file.cell(at),
        }
    }

    // The registry.

    pub fn bound(&self, ino: Ino) -> u64 {
        self.records.get(&ino).map_or(0, |record| record.bound)
    }

    pub fn raise(&mut self, ino: Ino, bound: u64) {
        if let Some(record) = self.records.get_mut(&ino) {
            record.bound = record.bound.max(bound);
        }
    }

    pub fn withdraw(&mut self, ino: Ino) {
        if let Some(record) = self.records.get_mut(&ino) {
            record.promise = None;
        }
    }

    pub fn forget(&mut self, ino: Ino) {
        self.records.remove(&ino);
        self.open.remove(&ino);
        self.empty(ino);
    }

    fn empty(&mut self, ino: Ino) {
        self.log.retain(|(of, _), _| *of != ino);
        self.log_durable.retain(|(of, _), _| *of != ino);
        self.log_pending.retain(|((of, _), _)| *of != ino);
        self.written.retain(|(of, _), _| *of != ino);
    }

    // The log.

    fn put(&mut self, ino: Ino, block: u64, cells: Cells) {
        let copied = Copied { cells, dirty: true };
        self.log.insert((ino, block), copied);
        self.log_pending.push(((ino, block), cells));
    }

    fn merged(&self, ino: Ino, block: u64) -> Cells {
        let mut cells = [0; CELLS];
        for (n, cell) in cells.iter_mut().enumerate() {
            *cell = self.read(ino, block + n as u64 * CELL);
        }
        cells
    }

    fn lay(&mut self, ino: Ino, from: u64, to: u64, value: u32) {
        let mut cells = self.merged(ino, block(from));
        for at in (from..to).step_by(CELL as usize) {
            cells[((at % BLOCK) / CELL) as usize] = value;
        }
        self.put(ino, block(from), cells);
    }

    /// A client's write. The file is long enough.
    pub fn write(&mut self, ino: Ino, from: u64, to: u64, value: u32, durable: bool) {
        let mut at = from;
        while at < to {
            let end = (block(at) + BLOCK).min(to);
            self.lay(ino, at, end, value);
            at = end;
        }
        if durable {
            self.flush_log();
        }
    }

    /// Where there is neither a copy nor data, there are zeros already.
    pub fn zero(&mut self, ino: Ino, from: u64, to: u64, durable: bool) {
        let copies = self.log.range((ino, block(from))..(ino, to));
        let mut blocks: BTreeSet<u64> = copies.map(|((_, at), _)| *at).collect();
        blocks.extend(
            self.file(ino)
                .cells
                .range(from..to)
                .map(|(at, _)| block(*at)),
        );
        for at in blocks {
            let (from, to) = (from.max(at), to.min(at + BLOCK));
            if from < to {
                self.lay(ino, from, to, 0);
            }
        }
        if durable {
            self.flush_log();
        }
    }

    pub fn flush_log(&mut self) {
        for (place, cells) in self.log_pending.drain(..) {
            let copied = Copied { cells, dirty: true };
            self.log_durable.insert(place, copied);
        }
    }

    /// One block that is durable in the log is written to the file, cut off at its end.
    fn write_back(&mut self, ino: Ino) {
        if self.open.get(&ino) != Some(&true) {
            return;
        }
        let dirty = self.log.range((ino, 0)..(ino + 1, 0));
        let dirty: Vec<u64> = dirty
            .filter(|(place, copied)| {
                copied.dirty && self.log_pending.iter().all(|(p, _)| p != *place)
            })
            .map(|((_, at), _)| *at)
            .collect();
        let any = self.dice.roll(dirty.len().max(1) as u64) as usize;
        let Some(at) = dirty.get(any).copied() else {
            return;
        };
        if !self.promise_stays {
            self.withdraw(ino);
        }
        let cells = self.log[&(ino, at)].cells;
        for (n, value) in cells.into_iter().enumerate() {
            let to = at + n as u64 * CELL;
            if to < self.file(ino).len {
                self.change(ino, FileOp::Cell(to, value));
            }
        }
        self.written.insert((ino, at), cells);
    }

    /// What was written back is made durable, and is dirty no more unless it was written again.
    fn flush_origin(&mut self, ino: Ino) {
        self.sync(ino);
        let written: Vec<_> = self.written.range((ino, 0)..(ino + 1, 0)).collect();
        let written: Vec<_> = written.into_iter().map(|(p, c)| (*p, *c)).collect();
        for (place, cells) in written {
            self.written.remove(&place);
            let newer = self.log_pending.iter().any(|(p, _)| *p == place);
            for log in [&mut self.log, &mut self.log_durable] {
                if let Some(copied) = log.get_mut(&place)
                    && copied.cells == cells
                    && !newer
                {
                    copied.dirty = false;
                }
            }
        }
    }

    fn is_dirty(&self, ino: Ino) -> bool {
        let mut of = self.log.range((ino, 0)..(ino + 1, 0));
        of.any(|(_, copied)| copied.dirty)
    }

    fn close(&mut self, ino: Ino) {
        let settled = self.open.get(&ino) == Some(&true);
        if self.busy == Some(ino) || !settled || (self.is_dirty(ino) && !self.promise_early) {
            return;
        }
        if !self.promise_early {
            self.sync(ino);
        }
        let look = (self.file(ino).len, self.file(ino).stamp);
        if let Some(record) = self.records.get_mut(&ino) {
            record.promise = Some(look);
        }
        self.written.retain(|(of, _), _| *of != ino);
        self.open.remove(&ino);
    }

    /// Makes a file a disk; tells what lies in the log behind its end. `None` if it is one.
    pub fn open(&mut self, ino: Ino) -> Option<Vec<(u64, u64)>> {
        self.busy = Some(ino);
        if self.open.contains_key(&ino) {
            return None;
        }
        self.settle(ino);
        self.inode(ino).synced = 0;
        let (len, stamp) = (self.file(ino).len, self.file(ino).stamp);
        let bound = large::bound(len, large::STEP, MOST);
        let record = self.records.entry(ino).or_insert(Record {
            bound,
            promise: None,
        });
        record.bound = record.bound.max(bound);
        if record.promise.is_some_and(|look| look != (len, stamp)) {
            record.promise = None;
            self.empty(ino);
        }
        self.open.insert(ino, false);
        let dirty = self.log.range((ino, 0)..(ino + 1, 0));
        let dirty = dirty.filter(|(_, copied)| copied.dirty);
        let behind = dirty.map(|((_, at), _)| (*at, BLOCK));
        Some(behind.filter(|(at, size)| at + size > len).collect())
    }

    /// What lay behind the end is zeros.
    pub fn opened(&mut self, ino: Ino) {
        self.open.insert(ino, true);
    }

    // One of two trees: no log, and what is written goes to the file.

    /// With one more directory, which clients do not see.
    pub fn with_hidden(mut self) -> Model {
        self.dirs.push(Dir::default());
        self.hidden += 1;
        self
    }

    /// Some of what is not durable becomes so of its own accord.
    pub fn settle_some(&mut self) {
        let dir = self.dice.roll(self.dirs.len() as u64) as usize;
        if self.dice.chance(50) && self.may_settle(dir) {
            let op = self.dirs[dir].pending.remove(0);
            self.settle_name(dir, op);
        }
        let inos: Vec<Ino> = self.inodes.keys().copied().collect();
        if self.dice.chance(50)
            && let Some(ino) = inos.get(self.dice.roll(inos.len().max(1) as u64) as usize)
        {
            self.settle(*ino);
        }
    }

    /// Everything is durable.
    pub fn sync_all(&mut self) {
        for dir in 0..self.dirs.len() {
            self.sync_names(dir);
        }
        let inos: Vec<Ino> = self.inodes.keys().copied().collect();
        inos.into_iter().for_each(|ino| self.settle(ino));
    }

    pub fn names_in(&self, dir: usize) -> BTreeMap<Name, Ino> {
        self.dirs[dir].now.clone()
    }

    /// A file that is found by its number: it has one, and a name, be it one that clients do not see.
    pub fn numbered(&self, ino: Ino) -> bool {
        let mut names = self.dirs.iter().flat_map(|dir| dir.now.values());
        names.any(|of| *of == ino) && self.file(ino).dressed
    }

    pub fn put_in_file(&mut self, ino: Ino, from: u64, to: u64, value: u32) {
        if to > self.file(ino).len {
            self.set_len(ino, to);
        }
        for at in (from..to).step_by(CELL as usize) {
            self.change(ino, FileOp::Cell(at, value));
        }
    }

    /// What is not zero in a range.
    pub fn cells_in(&self, ino: Ino, from: u64, to: u64) -> BTreeMap<u64, u32> {
        let cells = self.file(ino).cells.range(from..to);
        cells
            .filter(|(_, value)| **value != 0)
            .map(|(at, value)| (*at, *value))
            .collect()
    }

    // Crashes.

    pub fn crash(&mut self) {
        self.crashes += 1;
        self.steps_left = u32::MAX;
        let first = self.dice.roll(self.dirs.len() as u64) as usize;
        for n in 0..self.dirs.len() {
            let dir = (first + n) % self.dirs.len();
            let kept = self.dice.roll(self.dirs[dir].pending.len() as u64 + 1);
            for _ in 0..kept {
                if self.may_settle(dir) {
                    let op = self.dirs[dir].pending.remove(0);
                    self.settle_name(dir, op);
                }
            }
            self.dirs[dir].pending.clear();
            self.dirs[dir].now = self.dirs[dir].durable.clone();
        }
        for inode in self.inodes.values_mut() {
            for (op, stamp) in std::mem::take(&mut inode.pending) {
                if self.dice.chance(50) {
                    inode.durable.apply(op, stamp);
                }
            }
            inode.now = inode.durable.clone();
            inode.synced = 0;
        }
        let share = [0, 50, 100][self.dice.roll(3) as usize];
        for (place, cells) in std::mem::take(&mut self.log_pending) {
            if self.dice.chance(share) {
                let copied = Copied { cells, dirty: true };
                self.log_durable.insert(place, copied);
            }
        }
        // What lies behind a bound, or is of nobody, is not found again.
        let records = &self.records;
        let is_found = |(ino, at): &(Ino, u64)| records.get(ino).is_some_and(|r| *at < r.bound);
        self.log_durable.retain(|place, _| is_found(place));
        self.log = self.log_durable.clone();
        self.written.clear();
        self.open.clear();
        self.crossing = None;
    }

    /// Forgets what is gone; tells which files have something only in the log.
    pub fn start(&mut self) -> Vec<Ino> {
        let named = self.named_files();
        let known: Vec<Ino> = self.records.keys().copied().collect();
        for ino in &known {
            if !named.contains(ino) {
                self.forget(*ino);
            }
        }
        self.owing()
    }

    /// Files that have something only in the log.
    pub fn owing(&self) -> Vec<Ino> {
        let known = self.records.keys().copied();
        known.filter(|ino| self.is_dirty(*ino)).collect()
    }

    /// Everything is written back. All that owe something are open.
    pub fn write_all_back(&mut self) {
        self.flush_log();
        for ino in self.owing() {
            while self.is_dirty(ino) {
                self.write_back(ino);
                self.flush_origin(ino);
            }
        }
    }

    /// The flash is gone.
    pub fn lose_flash(&mut self) {
        self.log.clear();
        self.log_durable.clear();
    }
}

/// A name, for as long as anybody may want it.
fn known(name: &[u8]) -> Name {
    let all = super::NAMES.iter().chain(super::two::PUT_ASIDE);
    let mut same = all.filter(|own| **own == name);
    same.next().expect("a name of ours")
}
