//! Two directories of this host.

mod failing;

use std::collections::BTreeMap;
use std::fs;
use std::os::unix::fs::MetadataExt;
use std::sync::atomic::{AtomicU64, Ordering};

use hearth_nfs::access::Who;
use hearth_nfs::tree::Tree;
use hearth_nfs::v3::{Create, How, SetAttributes};

use hearth_trees::pair::{Mended, Sides};

use super::side::ROOT;
use super::*;

/// Far longer than anything here takes.
const LIMIT: Duration = Duration::from_secs(120);

/// Rings when something happens to a tree.
#[derive(Default)]
struct Bell {
    rung: Mutex<u64>,
    /// How often a tree went out.
    lost: AtomicU64,
    heard: Condvar,
}

impl Bell {
    fn ring(&self) {
        *lock(&self.rung) += 1;
        self.heard.notify_all();
    }

    /// Waits until something is so: looked at whenever a tree changes its state, and now and then, for it may change more than that.
    fn until(&self, what: &str, mut is: impl FnMut() -> bool) {
        let began = Instant::now();
        let mut rung = lock(&self.rung);
        loop {
            let seen = *rung;
            drop(rung);
            if is() {
                return;
            }
            assert!(began.elapsed() < LIMIT, "{what}: not so in time");
            rung = lock(&self.rung);
            if *rung == seen {
                let waited = self.heard.wait_timeout(rung, Duration::from_millis(20));
                rung = waited.unwrap_or_else(PoisonError::into_inner).0;
            }
        }
    }
}

impl Witness for Bell {
    fn lost(&self, _directory: &Path, _why: &str) {
        self.lost.fetch_add(1, Ordering::SeqCst);
        self.ring();
    }

    fn resyncing(&self, _directory: &Path, _places: u64) {
        self.ring();
    }

    fn current(&self, _directory: &Path) {
        self.ring();
    }

    fn keep(&self, _stamp: &[u8]) {}

    fn scrubbed(&self, _scrub: &crate::store::scrub::Scrub) {}
}

struct Place2 {
    place: tempfile::TempDir,
    bell: Arc<Bell>,
}

/// Two directories, unless this host gives files no such attributes.
fn place() -> Option<Place2> {
    let place = tempfile::tempdir().unwrap();
    for name in ["a", "b"] {
        fs::create_dir(place.path().join(name)).unwrap();
    }
    let mark = Mark {
        side: 0,
        store: 1,
        generation: 0,
    };
    if let Err(e) = side::mark(&place.path().join("a"), mark) {
        eprintln!("skipped: {e}");
        return None;
    }
    side::unmark(&place.path().join("a"));
    Some(Place2 {
        place,
        bell: Arc::default(),
    })
}

impl Place2 {
    fn both(&self) -> [PathBuf; 2] {
        ["a", "b"].map(|name| self.place.path().join(name))
    }

    fn open_in(&self, state: &str) -> Result<Twin, String> {
        self.open_patient(state, LIMIT)
    }

    fn open_patient(&self, state: &str, limit: Duration) -> Result<Twin, String> {
        let state = self.place.path().join(state);
        fs::create_dir_all(&state).unwrap();
        let setup = Setup {
            directories: self.both(),
            state,
            store: 77,
            stamp: None,
            limit,
            witness: self.bell.clone(),
        };
        Twin::open(setup).map(|(twin, _)| twin)
    }

    fn open(&self) -> Twin {
        self.open_in("state").unwrap()
    }

    fn wait_current(&self, twin: &Twin) {
        self.bell.until("both hold everything", || {
            twin.report().iter().all(|tree| tree.state == "current")
        });
    }

    fn wait_out(&self, twin: &Twin, side: usize) {
        self.bell
            .until("one is out", || twin.report()[side].state != "current");
    }

    /// Everything in a directory: kind, mode, content or target.
    fn seen(&self, side: usize) -> BTreeMap<PathBuf, (u32, Vec<u8>)> {
        let root = self.both()[side].clone();
        let mut all = BTreeMap::new();
        let mut todo = vec![root.clone()];
        while let Some(dir) = todo.pop() {
            for entry in fs::read_dir(dir).unwrap() {
                let path = entry.unwrap().path();
                if path == root.join("lost+found") {
                    continue;
                }
                let meta = path.symlink_metadata().unwrap();
                let content = if meta.is_dir() {
                    todo.push(path.clone());
                    Vec::new()
                } else if meta.is_symlink() {
                    fs::read_link(&path)
                        .unwrap()
                        .into_os_string()
                        .into_encoded_bytes()
                } else {
                    fs::read(&path).unwrap()
                };
                let inside = path.strip_prefix(&root).unwrap().to_owned();
                all.insert(inside, (meta.mode(), content));
            }
        }
        all
    }
}

fn make(twin: &Twin, dir: &Key, name: &str) -> Key {
    let what = Create::File(How::Guarded(SetAttributes::default()));
    let made = twin.create(&Who::root(), dir, name.as_bytes(), &what);
    made.outcome.unwrap().key
}

fn directory(twin: &Twin, dir: &Key, name: &str) -> Key {
    let what = Create::Directory(SetAttributes::default());
    let made = twin.create(&Who::root(), dir, name.as_bytes(), &what);
    made.outcome.unwrap().key
}

fn write(twin: &Twin, file: &Key, at: u64, data: &[u8]) {
    let file = twin.open_regular(file).unwrap();
    if file.stat().unwrap().0.st_size < (at + data.len() as u64) as i64 {
        file.set_len(at + data.len() as u64).unwrap();
    }
    file.write(at, data.to_vec()).unwrap();
    file.sync().unwrap();
}

/// The cache of one file, of which a guest wrote what `blocks` have.
struct Written(Vec<(u64, Vec<u8>)>);

impl hearth_mirror::Cache for Written {
    fn clean(&self, offset: u64, len: u64) -> Vec<hearth_mirror::Cached> {
        let within = |block: &u64| (offset..offset + len).contains(&(block * 4096));
        let cached = |(block, data): &(u64, Vec<u8>)| hearth_mirror::Cached {
            block: *block,
            sum: hearth_mirror::sums_of(data)[0],
            written: true,
        };
        let all = self.0.iter().filter(|(block, _)| within(block));
        all.map(cached).collect()
    }

    fn drop_unlike(&self, _offset: u64, _right: &[u32]) {}
}

/// A repair is no change: after a crash that loses it, the right tree must not get the wrong one's content, and its file looks
/// as it was left.
#[test]
fn lost_repair_leaves_right_tree_alone() {
    let Some(place) = place() else { return };
    prepare(&place.both(), 77).unwrap();
    let twin = place.open();
    place.wait_current(&twin);
    let file = make(&twin, &twin.root(), "disk.img");
    let good = vec![7; 8 * 4096];
    write(&twin, &file, 0, &good);
    twin.settle();
    let first = place.both()[0].join("disk.img");
    let mut rotten = good.clone();
    rotten[4096..8192].fill(9);
    fs::write(&first, &rotten).unwrap();
    let before = fs::metadata(&first).unwrap();
    let cache = Written(vec![(1, good[..4096].to_vec())]);
    let open = twin.open_regular(&file).unwrap();
    let done = open.reconcile(0, 1 << 20, &cache, None).unwrap();
    assert_eq!(done.repaired, [(4096, 4096)]);
    assert_eq!(fs::read(&first).unwrap(), good);
    let after = fs::metadata(&first).unwrap();
    assert_eq!(after.modified().unwrap(), before.modified().unwrap());
    // The power fails before the disk has it.
    drop((open, twin));
    fs::write(&first, &rotten).unwrap();
    let twin = place.open();
    place.wait_current(&twin);
    assert_eq!(fs::read(place.both()[1].join("disk.img")).unwrap(), good);
    // Both are equal: the copy that was read may come from either.
    fs::write(&first, &good).unwrap();
    let open = twin.open_regular(&file).unwrap();
    let done = open.reconcile(0, 1 << 20, &cache, None).unwrap();
    assert!(done.repaired.is_empty() && done.undecided.is_empty());
}

fn listed(twin: &Twin, dir: &Key) -> Vec<String> {
    let (mut names, mut cookie) = (Vec::new(), 0);
    loop {
        let mut room = 2;
        let done = twin.list(&Who::root(), dir, cookie, true, &mut |entry| {
            if room == 0 {
                return false;
            }
            room -= 1;
            cookie = entry.cookie;
            names.push(String::from_utf8(entry.name.to_vec()).unwrap());
            true
        });
        if done.unwrap() {
            names.sort();
            return names;
        }
    }
}

#[test]
fn both_hold_everything_and_one_that_was_away_gets_what_it_missed() {
    let Some(place) = place() else { return };
    let [a, b] = place.both();
    fs::create_dir(a.join("old")).unwrap();
    fs::write(a.join("old/disk.img"), vec![7; 3 << 20]).unwrap();
    std::os::unix::fs::symlink("old/disk.img", a.join("link")).unwrap();
    prepare(&[a.clone(), b.clone()], 77).unwrap();
    let twin = place.open();
    let (root, who) = (twin.root(), Who::root());
    place.wait_current(&twin);
    assert_eq!(place.seen(0), place.seen(1));
    assert_eq!(place.seen(1).len(), 3);
    let vm = directory(&twin, &root, "vm");
    let file = make(&twin, &vm, "x.vmx");
    write(&twin, &file, 0, b"first");
    let old = twin.lookup(&who, &root, b"old").unwrap().key;
    assert_eq!(place.seen(0), place.seen(1));
    assert_eq!(listed(&twin, &root), [".", "..", "link", "old", "vm"]);

    // The first one is taken away, and clients go on.
    let away = place.place.path().join("away");
    fs::rename(&a, &away).unwrap();
    place.wait_out(&twin, 0);
    write(&twin, &file, 3, b"st of all");
    twin.rename(&who, (&vm, b"x.vmx"), (&root, b"y.vmx"))
        .0
        .unwrap();
    twin.rename(&who, (&root, b"vm"), (&old, b"vm")).0.unwrap();
    twin.remove(&who, &root, b"link", false).outcome.unwrap();
    let disk = twin.lookup(&who, &old, b"disk.img").unwrap().key;
    write(&twin, &disk, 2 << 20, &[9; 4096]);
    let cut = SetAttributes {
        size: Some((2 << 20) + 5000),
        ..SetAttributes::default()
    };
    twin.set_attributes(&who, &disk, &cut, None)
        .outcome
        .unwrap();
    make(&twin, &vm, "new");
    assert!(!a.exists());
    assert_eq!(twin.attributes(&file).unwrap().size, 12);

    fs::rename(&away, &a).unwrap();
    place.wait_current(&twin);
    assert_eq!(place.seen(0), place.seen(1));
    assert_eq!(fs::read(a.join("y.vmx")).unwrap(), b"first of all");
    assert!(a.join("old/vm/new").exists());
    // What clients call a file is found in either tree, and with nothing but that tree.
    drop(twin);
    fs::rename(&a, &away).unwrap();
    let twin = place.open();
    assert_eq!(twin.attributes(&file).unwrap().size, 12);
    assert_eq!(twin.lookup(&who, &root, b"y.vmx").unwrap().key, file);
}

#[test]
fn a_tree_that_missed_something_is_not_used_alone_and_an_old_one_gets_everything() {
    let Some(place) = place() else { return };
    let [a, b] = place.both();
    prepare(&[a.clone(), b.clone()], 77).unwrap();
    let twin = place.open();
    place.wait_current(&twin);
    let root = twin.root();
    make(&twin, &root, "one");
    let away = place.place.path().join("away");
    fs::rename(&a, &away).unwrap();
    place.wait_out(&twin, 0);
    make(&twin, &root, "two");
    drop(twin);
    // Only the one that missed it is there, and even without the book that is known if both are.
    let gone = place.place.path().join("gone");
    fs::rename(&b, &gone).unwrap();
    fs::rename(&away, &a).unwrap();
    let refused = place.open_in("state").err().unwrap();
    assert!(refused.contains("has missed changes"), "{refused}");
    fs::rename(&gone, &b).unwrap();
    let twin = place.open_in("other").unwrap();
    place.wait_current(&twin);
    assert!(a.join("two").exists());
    assert_eq!(place.seen(0), place.seen(1));
    // A directory that is empty in a tree's place gets everything.
    fs::remove_dir_all(&b).unwrap();
    place.wait_out(&twin, 1);
    // But not where a disk was mounted that is not there.
    let mounted = place.place.path().join("other/tree-1/mounted");
    fs::write(&mounted, "").unwrap();
    fs::create_dir(&b).unwrap();
    place.bell.until("it is seen that no disk is mounted", || {
        let why = twin.report()[1].why.clone();
        why.is_some_and(|why| why.contains("nothing is mounted"))
    });
    fs::remove_file(mounted).unwrap();
    place.wait_current(&twin);
    assert_eq!(place.seen(0), place.seen(1));
    assert_eq!(place.seen(1).len(), 2);
}

/// After a crash nobody would see of a name in a tree that its file has not been filled yet.
#[test]
fn nothing_is_brought_to_a_tree_before_its_content_is_noted() {
    let Some(place) = place() else { return };
    let [a, b] = place.both();
    fs::create_dir(a.join("vm")).unwrap();
    fs::write(a.join("disk.img"), [7; 100]).unwrap();
    fs::write(a.join("vm/vm.vmx"), "text").unwrap();
    prepare(&[a.clone(), b.clone()], 77).unwrap();
    let twin = place.open();
    place.wait_current(&twin);
    let root = twin.root();
    let number = |dir: &Key, name: &[u8]| {
        let found = twin.lookup(&Who::root(), dir, name).unwrap();
        number_of(&found.key).unwrap()
    };
    let (disk, vm) = (number(&root, b"disk.img"), number(&root, b"vm"));
    let vmx = number(&key_of(vm), b"vm.vmx");
    fs::remove_file(b.join("disk.img")).unwrap();
    fs::remove_dir_all(b.join("vm")).unwrap();
    let file = |number| vec![Place::File(number), Place::Part(number, mend::WHOLE)];
    let [all, above, text] = [
        [file(disk), vec![Place::Names(vm)]].concat(),
        vec![Place::Names(vm)],
        file(vmx),
    ];
    let sides = twin.inner.trees.sides();
    let mend = |place, noted: &[Place], seen| {
        let noted = noted.iter().copied().collect();
        sides.mend(place, 0, 1, &noted, seen).unwrap()
    };
    let first = |mended| match mended {
        Mended::First(places, seen) => (places, seen),
        Mended::Done(more) => panic!("{more:?}"),
    };
    let sorted = |mut places: Vec<Place>| {
        places.sort();
        places
    };
    // A directory that is not there is brought with what is in it.
    let (places, seen) = first(mend(Place::Names(vm), &[], None));
    assert_eq!(places, above);
    assert!(!b.join("vm").exists());
    let (places, _) = first(mend(Place::Names(vm), &above, Some(seen)));
    assert_eq!(places, text);
    assert!(!b.join("vm/vm.vmx").exists());
    fs::remove_dir_all(b.join("vm")).unwrap();
    // And its names are looked at once.
    let listings = || sides.open(0).unwrap().listings.load(Ordering::SeqCst);
    let before = listings();
    let (places, seen) = first(mend(Place::Names(ROOT), &[], None));
    assert_eq!(sorted(places), sorted(all.clone()));
    assert!(!b.join("disk.img").exists() && !b.join("vm").exists());
    let more = match mend(Place::Names(ROOT), &all, Some(seen)) {
        Mended::Done(more) => more,
        Mended::First(places, _) => panic!("{places:?}"),
    };
    assert_eq!(listings(), before + 1);
    assert_eq!(sorted(more), sorted(all));
    assert!(b.join("disk.img").exists() && b.join("vm").exists());
}

#[test]
fn what_would_be_lost_is_not_taken_as_the_second_tree() {
    let Some(place) = place() else { return };
    let both = place.both();
    fs::write(both[1].join("mine"), b"x").unwrap();
    let refused = prepare(&both, 77).unwrap_err().what;
    assert!(refused.contains("has to be empty"), "{refused}");
    fs::remove_file(both[1].join("mine")).unwrap();
    prepare(&both, 77).unwrap();
}

/// The daemon of the package is root, and yet may not.
#[test]
fn a_directory_that_takes_no_mark_names_the_right_that_is_lacked() {
    let refused = |errno: rustix::io::Errno| unmarked(Path::new("/a"), &errno.into());
    let right = refused(rustix::io::Errno::PERM);
    assert!(right.what.contains("CAP_SYS_ADMIN"), "{right:?}");
    assert!(right.remedy.contains("systemctl edit hearth"), "{right:?}");
    let kept = refused(rustix::io::Errno::OPNOTSUPP);
    assert!(!kept.what.contains("CAP_SYS_ADMIN"), "{kept:?}");
    assert!(kept.remedy.contains("ext4"), "{kept:?}");
}
