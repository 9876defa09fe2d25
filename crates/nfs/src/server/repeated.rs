//! Calls that change names or attributes, and may have been carried out by the process before.
//!
//! Within one process a repetition gets the [answer that was kept](super::replies). Over a kill only the
//! [ledger] tells what was begun, also to one that its client sends under a new number because it was told to ask again. A call that had ended well is not carried out again: meanwhile others may
//! have used the name. One that was only begun is, and what it finds done already is its own work:
//!
//! - a removal that finds no such name has removed it;
//! - a rename that finds its source gone has moved it, if what has the new name is what it was to move;
//! - a creation that finds the name taken has made it, if it is empty, was written or changed then, and nobody else
//!   was making it: it may lack its owner, so it is made anew. Either time counts: of one datastore in two directories it is changed once more
//!   when it is brought to the other one, or gets its number;
//! - a link to the very file is that link;
//! - attributes that were to be set "if nobody changed the file since" were set by it, if they were changed then.
//!
//! [ledger]: crate::ledger

use std::net::IpAddr;
use std::sync::Arc;

use super::call::{Answered, Cx};
use super::flight::{Flight, Noted};
use crate::access::Who;
use crate::ledger::{Before, Ledger, NOWHERE, Place, Window, now};
use crate::rpc;
use crate::tree::Changed;
use crate::v3::{Args, Create, Kind, Named, Status, Wcc, put_optional, put_wcc};
use crate::xdr::Writer;

/// What became of a change is not known any more.
fn unknown<T>(outcome: T) -> Changed<T> {
    Changed {
        outcome: Ok(outcome),
        wcc: Wcc::default(),
    }
}

impl Cx<'_> {
    /// Carries a change out, unless that was done before.
    pub(super) fn noted(
        &self,
        args: &Args<'_>,
        client: Option<IpAddr>,
        message: &[u8],
        flight: Option<&Flight>,
    ) -> Answered {
        let (Some(ledger), Some(client)) = (&self.export.ledger, client) else {
            return self.change(args);
        };
        let about: Vec<(&[u8], &[u8])> = args.about().into_iter().flatten().collect();
        let known = ledger.known(client, message, about.first().copied().unwrap_or_default());
        ledger.touched(client, message, &known, &about, now());
        // Of one that comes under a new number, the call it repeats.
        let (before, first) = match ledger.recall(&known.id) {
            Some(before) => (Some(before), None),
            None => match ledger.recall_told(client, message, &known, now()) {
                Some((before, first)) => (Some(before), Some(first)),
                None => (None, None),
            },
        };
        let window = match before {
            Some(Before::Ended) => {
                // Under its new number it may come once more.
                let place = self.place(ledger, args);
                ledger.end(ledger.begin(known.id, place, None), true);
                ledger.untold(&known.content);
                return self.was_done(args);
            }
            Some(Before::Begun(window)) => Some(window),
            None => None,
        };
        let place = window.map_or_else(|| self.place(ledger, args), |window| window.place);
        let entry = ledger.begin(known.id, place, window);
        // Not of the one that is repeated any more, but of this one.
        ledger.untold(&known.content);
        if let Some(flight) = flight.filter(|_| args.is_done_once()) {
            let ledger = Arc::clone(ledger);
            let noted = Noted { ledger, known };
            if !flight.expects(&noted) {
                noted.ledger.told(&known);
            }
        }
        let answer = match window {
            None => self.change(args),
            Some(window) => self.resume(args, &window),
        };
        let well = answer.as_ref().is_ok_and(|w| self.went_well(w));
        ledger.end(entry, well);
        if let Some(first) = first.filter(|_| well) {
            ledger.end(ledger.begin(first, place, None), true);
        }
        answer
    }

    /// What is noted of a call that makes or moves something.
    fn place(&self, ledger: &Ledger, args: &Args<'_>) -> Place {
        let source = |from: &Named<'_>| {
            let dir = self.named(from, Status::Inval)?;
            self.export.tree.lookup(&Who::root(), &dir, from.name)
        };
        match args {
            Args::Create { at, .. } => ledger.place(at.dir, at.name),
            Args::Rename { from, .. } => {
                source(from).map_or(NOWHERE, |found| ledger.moved(&found.key))
            }
            _ => NOWHERE,
        }
    }

    /// What an answer tells.
    fn status<'w>(&self, answer: &'w Writer) -> Option<&'w [u8; 4]> {
        let head = rpc::success(self.xid).len();
        answer.as_slice().get(head..)?.first_chunk()
    }

    fn went_well(&self, answer: &Writer) -> bool {
        self.status(answer) == Some(&[0; 4])
    }

    fn failed_with(&self, answer: &Answered, status: Status) -> bool {
        match answer {
            Err(s) => *s == status,
            Ok(w) => self.status(w) == Some(&(status as u32).to_be_bytes()),
        }
    }

    /// The answer to what had ended well before.
    fn was_done(&self, args: &Args<'_>) -> Answered {
        match args {
            Args::Create { at, .. } => {
                let dir = self.named(at, Status::Exist)?;
                match self.export.tree.lookup(&self.who, &dir, at.name) {
                    Ok(found) => Ok(self.created(&unknown(found))),
                    // The client looks for itself.
                    Err(_) => {
                        let mut w = self.ok();
                        w.bool(false).bool(false);
                        put_wcc(&mut w, &Wcc::default());
                        Ok(w)
                    }
                }
            }
            Args::Rename { .. } => {
                let mut w = self.ok();
                put_wcc(&mut w, &Wcc::default());
                put_wcc(&mut w, &Wcc::default());
                Ok(w)
            }
            Args::Link { .. } => Ok(self.linked()),
            _ => Ok(self.changed(&unknown(()))),
        }
    }

    fn linked(&self) -> Writer {
        let mut w = self.ok();
        put_optional(&mut w, None);
        put_wcc(&mut w, &Wcc::default());
        w
    }

    /// Carries out what may have been done in part.
    fn resume(&self, args: &Args<'_>, window: &Window) -> Answered {
        match args {
            Args::Create { at, what } => {
                self.unmake(at, what, window);
                self.change(args)
            }
            Args::SetAttr { file, set, only_if } => {
                let key = self.key(file)?;
                let ours = |found: crate::v3::Attributes| window.holds(found.changed);
                let set_by_us = self.export.tree.attributes(&key).is_ok_and(ours);
                let only_if = only_if.filter(|_| !set_by_us);
                let (file, set) = (*file, *set);
                self.change(&Args::SetAttr { file, set, only_if })
            }
            Args::Remove(_) | Args::RmDir(_) => {
                let answer = self.change(args);
                if self.failed_with(&answer, Status::NoEnt) {
                    return self.was_done(args);
                }
                answer
            }
            Args::Rename { to, .. } => {
                let answer = self.change(args);
                let moved = || {
                    let dir = self.named(to, Status::Inval)?;
                    let found = self.export.tree.lookup(&self.who, &dir, to.name)?;
                    let ledger = self.export.ledger.as_ref();
                    let own = ledger.map(|ledger| ledger.moved(&found.key));
                    Ok::<_, Status>(match window.place {
                        // Noted by a daemon that did not know.
                        NOWHERE => window.holds(found.attributes.changed),
                        place => own == Some(place),
                    })
                };
                if self.failed_with(&answer, Status::NoEnt) && moved().unwrap_or(false) {
                    return self.was_done(args);
                }
                answer
            }
            Args::Link { file, at } => {
                let answer = self.change(args);
                let is_it = || {
                    let dir = self.named(at, Status::Exist)?;
                    let found = self.export.tree.lookup(&self.who, &dir, at.name)?;
                    Ok::<_, Status>(found.key == self.key(file)?)
                };
                if self.failed_with(&answer, Status::Exist) && is_it().unwrap_or(false) {
                    return Ok(self.linked());
                }
                answer
            }
            _ => self.change(args),
        }
    }

    /// Takes away what the call made before, of which it was never told, and nobody else can know.
    fn unmake(&self, at: &Named<'_>, what: &Create<'_>, window: &Window) {
        let root = Who::root();
        let kind = match what {
            Create::File(_) => Kind::Regular,
            Create::Directory(_) => Kind::Directory,
            Create::Link { .. } => Kind::Link,
            Create::Socket(_) => Kind::Socket,
            Create::Fifo(_) => Kind::Fifo,
            Create::Device { .. } | Create::Other => return,
        };
        let tree = &self.export.tree;
        let Ok(dir) = self.named(at, Status::Exist) else {
            return;
        };
        let Ok(found) = tree.lookup(&root, &dir, at.name) else {
            return;
        };
        let a = &found.attributes;
        let empty = kind != Kind::Regular || (a.size == 0 && a.links == 1);
        let then = window.holds(a.changed) || window.holds(a.modified);
        if window.alone && a.kind == kind && empty && then {
            // A directory with something in it stays.
            let _ = tree.remove(&root, &dir, at.name, kind == Kind::Directory);
        }
    }
}

#[cfg(test)]
mod tests {
    use std::cell::Cell;
    use std::fs;
    use std::os::unix::fs::MetadataExt;
    use std::path::Path;

    use super::*;
    use crate::access::Rights;
    use crate::handle::Key;
    use crate::ledger::SLACK;
    use crate::local::Directory;
    use crate::server::Export;
    use crate::v3::{How, SetAttributes, SetTime};

    const CLIENT: &str = "192.0.2.1";
    const MODE: SetAttributes = SetAttributes {
        mode: Some(0o640),
        uid: None,
        gid: None,
        size: None,
        accessed: SetTime::Keep,
        modified: SetTime::Keep,
    };

    struct Stage {
        place: tempfile::TempDir,
        /// Calls so far: each has another number.
        calls: Cell<u32>,
    }

    /// A process that serves the directory; the next one finds what it left, as after a kill.
    fn process(place: &Path) -> Export {
        let vms = place.join("vms");
        fs::create_dir_all(&vms).expect("made");
        let (directory, identity) = Directory::open(&vms, &place.join("state")).expect("opened");
        directory.export("/vms", &identity)
    }

    impl Stage {
        fn new() -> Stage {
            let place = tempfile::tempdir().expect("a directory");
            Stage {
                place,
                calls: Cell::new(0),
            }
        }

        /// The process before begins a call, does of it what `work` does, and is killed. What the next
        /// one answers to its repetition.
        fn killed_in(
            &self,
            args: impl Fn(&Export) -> Args<'static>,
            ended: Option<bool>,
            work: impl FnOnce(&Path),
        ) -> u32 {
            let before = process(self.place.path());
            let args = args(&before);
            self.calls.set(self.calls.get() + 1);
            let message = self.calls.get().to_be_bytes();
            self.begun(&before, &args, &message, ended, work);
            self.told(&args, &message)
        }

        /// A process begins a call, does of it what `work` does, and is killed, if it does not end.
        fn begun(
            &self,
            before: &Export,
            args: &Args<'_>,
            message: &[u8],
            ended: Option<bool>,
            work: impl FnOnce(&Path),
        ) {
            let ledger = before.ledger.as_ref().expect("a ledger");
            let client = CLIENT.parse().expect("an address");
            let known = ledger.known(client, message, about(args));
            let entry = ledger.begin(known.id, cx(before, args).place(ledger, args), None);
            work(&self.place.path().join("vms"));
            if let Some(well) = ended {
                ledger.end(entry, well);
            }
        }

        /// What a new process answers.
        fn told(&self, args: &Args<'_>, message: &[u8]) -> u32 {
            self.told_by(&process(self.place.path()), args, message)
        }

        fn told_by(&self, export: &Export, args: &Args<'_>, message: &[u8]) -> u32 {
            let cx = cx(export, args);
            let client = Some(CLIENT.parse().expect("an address"));
            match cx.noted(args, client, message, None) {
                Err(status) => status as u32,
                Ok(w) => u32::from_be_bytes(*cx.status(&w).expect("a status")),
            }
        }

        fn path(&self, name: &str) -> std::path::PathBuf {
            self.place.path().join("vms").join(name)
        }
    }

    fn cx<'a>(export: &'a Export, args: &Args<'_>) -> Cx<'a> {
        let rights = Rights {
            write: true,
            root: true,
            ..Rights::default()
        };
        Cx::new(export, Who::root(), rights, 7, args.procedure())
    }

    fn about<'a>(args: &Args<'a>) -> (&'a [u8], &'a [u8]) {
        args.about()[0].expect("a change is about something")
    }

    fn handle(export: &Export, key: &Key) -> &'static [u8] {
        export.sealer.seal(key).leak()
    }

    fn at(export: &Export, name: &'static str) -> Named<'static> {
        Named {
            dir: handle(export, &export.tree.root()),
            name: name.as_bytes(),
        }
    }

    const OK: u32 = 0;
    const NOENT: u32 = Status::NoEnt as u32;
    const EXIST: u32 = Status::Exist as u32;

    fn rename(export: &Export) -> Args<'static> {
        Args::Rename {
            from: at(export, "a"),
            to: at(export, "b"),
        }
    }

    #[test]
    fn a_rename_is_found_done() {
        let stage = Stage::new();
        process(stage.place.path());
        fs::write(stage.path("a"), "moved").expect("written");
        let moves = |vms: &Path| fs::rename(vms.join("a"), vms.join("b")).expect("moved");
        assert_eq!(stage.killed_in(rename, None, moves), OK);
        assert_eq!(stage.killed_in(rename, Some(true), |_| ()), OK);
        assert_eq!(fs::read_to_string(stage.path("b")).expect("read"), "moved");
        // Not done, only begun.
        fs::write(stage.path("a"), "second").expect("written");
        assert_eq!(stage.killed_in(rename, None, |_| ()), OK);
        assert_eq!(fs::read_to_string(stage.path("b")).expect("read"), "second");
        // It ended well, and another took the name since.
        let moves = |vms: &Path| fs::write(vms.join("a"), "another's").expect("written");
        assert_eq!(stage.killed_in(rename, Some(true), moves), OK);
        assert_eq!(
            fs::read_to_string(stage.path("a")).expect("read"),
            "another's"
        );
        fs::remove_file(stage.path("a")).expect("removed");
        assert_eq!(
            stage.killed_in(rename, Some(false), |_| ()),
            NOENT,
            "it failed"
        );
    }

    #[test]
    fn what_was_moved_long_before_was_not_moved_by_it() {
        let stage = Stage::new();
        let export = process(stage.place.path());
        fs::write(stage.path("b"), "old").expect("written");
        let ledger = export.ledger.as_ref().expect("a ledger");
        let message = [7, 7, 7, 7];
        let client = CLIENT.parse().expect("an address");
        let known = ledger.known(client, &message, about(&rename(&export)));
        ledger.begin(known.id, NOWHERE, Some(Window::far_ahead()));
        assert_eq!(stage.told(&rename(&export), &message), NOENT);
    }

    /// What has the new name was changed at the same time, and is another file.
    #[test]
    fn what_another_moved_there_was_not_moved_by_it() {
        let stage = Stage::new();
        process(stage.place.path());
        fs::write(stage.path("a"), "").expect("written");
        let other = |vms: &Path| {
            fs::remove_file(vms.join("a")).expect("removed");
            fs::write(vms.join("c"), "").expect("written");
            fs::rename(vms.join("c"), vms.join("b")).expect("moved");
        };
        assert_eq!(stage.killed_in(rename, None, other), NOENT);
    }

    /// Waits until a file has been changed after everything that a process may have done that was there until now.
    fn changed_later(path: &Path) {
        let until = now() + SLACK + SLACK;
        let changed = || {
            let at = fs::symlink_metadata(path).expect("there");
            std::os::unix::fs::lchown(path, Some(at.uid()), Some(at.gid())).expect("changed");
            let at = fs::symlink_metadata(path).expect("there");
            std::time::Duration::new(at.ctime() as u64, at.ctime_nsec() as u32)
        };
        while changed() <= until {
            std::thread::yield_now();
        }
    }

    /// In two directories a file gets its number when it is seen that it has none, and a moved one is moved once more in the other: both after the
    /// start.
    #[test]
    fn what_is_changed_once_more_by_the_next_process_is_found_done() {
        let stage = Stage::new();
        process(stage.place.path());
        let link = |export: &Export| Args::Create {
            at: at(export, "l"),
            what: Create::Link {
                to: b"there",
                set: MODE,
            },
        };
        fs::write(stage.path("a"), "moved").expect("written");
        let before = process(stage.place.path());
        let (link, rename) = (link(&before), rename(&before));
        stage.begun(&before, &link, &[0, 0, 0, 1], None, |vms| {
            std::os::unix::fs::symlink("there", vms.join("l")).expect("made");
        });
        stage.begun(&before, &rename, &[0, 0, 0, 2], None, |vms| {
            fs::rename(vms.join("a"), vms.join("b")).expect("moved");
        });
        let next = process(stage.place.path());
        changed_later(&stage.path("l"));
        changed_later(&stage.path("b"));
        assert_eq!(stage.told_by(&next, &link, &[0, 0, 0, 1]), OK);
        assert_eq!(stage.told_by(&next, &rename, &[0, 0, 0, 2]), OK);
    }

    /// Its client was told to ask again, does so under a new number, and finds another process.
    #[test]
    fn what_is_asked_again_under_a_new_number_is_found_done() {
        let stage = Stage::new();
        process(stage.place.path());
        let remove = |export: &Export| Args::Remove(at(export, "a"));
        let link = |export: &Export| Args::Create {
            at: at(export, "l"),
            what: Create::Link {
                to: b"there",
                set: MODE,
            },
        };
        let message = |number: u32, what: &str| {
            let mut message = number.to_be_bytes().to_vec();
            message.extend_from_slice(what.as_bytes());
            message
        };
        let told = |export: &Export, args: &Args<'_>, message: &[u8]| {
            let ledger = export.ledger.as_ref().expect("a ledger");
            let client = CLIENT.parse().expect("an address");
            ledger.told(&ledger.known(client, message, about(args)));
        };
        for (from, ended) in [(10, None), (20, Some(true))] {
            fs::write(stage.path("a"), "").expect("written");
            let before = process(stage.place.path());
            let (link, remove) = (link(&before), remove(&before));
            for (args, what) in [(&link, "link"), (&remove, "remove")] {
                stage.begun(
                    &before,
                    args,
                    &message(from + 1, what),
                    ended,
                    |vms| match args {
                        Args::Remove(_) => fs::remove_file(vms.join("a")).expect("removed"),
                        _ => std::os::unix::fs::symlink("there", vms.join("l")).expect("made"),
                    },
                );
                told(&before, args, &message(from + 1, what));
            }
            let next = process(stage.place.path());
            assert_eq!(stage.told_by(&next, &link, &message(from + 2, "link")), OK);
            assert_eq!(
                stage.told_by(&next, &remove, &message(from + 2, "remove")),
                OK
            );
            // That was the answer. Who asks once more means it; but not if the answer was lost with this process.
            assert_eq!(
                stage.told_by(&next, &link, &message(from + 3, "link")),
                EXIST
            );
            assert_eq!(stage.told(&link, &message(from + 4, "link")), EXIST);
            assert_eq!(stage.told(&link, &message(from + 2, "link")), OK);
            assert_eq!(stage.told(&remove, &message(from + 3, "remove")), NOENT);
            fs::remove_file(stage.path("l")).expect("removed");
        }
    }

    #[test]
    fn a_removal_is_found_done() {
        let stage = Stage::new();
        process(stage.place.path());
        let remove = |export: &Export| Args::Remove(at(export, "a"));
        assert_eq!(stage.killed_in(remove, None, |_| ()), OK);
        // Ended well: what has the name now is another's.
        fs::write(stage.path("a"), "new").expect("written");
        assert_eq!(stage.killed_in(remove, Some(true), |_| ()), OK);
        assert!(stage.path("a").exists());
        assert_eq!(stage.killed_in(remove, None, |_| ()), OK);
        assert!(!stage.path("a").exists());
        let directory = |export: &Export| Args::RmDir(at(export, "d"));
        assert_eq!(stage.killed_in(directory, None, |_| ()), OK);
        assert_eq!(stage.killed_in(remove, Some(false), |_| ()), NOENT);
    }

    #[test]
    fn what_was_made_half_is_made_anew() {
        let create = |name, what| {
            move |export: &Export| Args::Create {
                at: at(export, name),
                what,
            }
        };
        let file = Create::File(How::Guarded(MODE));
        let directory = Create::Directory(MODE);
        let link = Create::Link {
            to: b"there",
            set: MODE,
        };
        let made = |vms: &Path| drop(fs::File::create(vms.join("a")).expect("made"));
        let stage = Stage::new();
        process(stage.place.path());
        assert_eq!(stage.killed_in(create("a", file), None, made), OK);
        let mode = fs::metadata(stage.path("a")).expect("there").mode();
        assert_eq!(mode & 0o7777, 0o640);
        fs::write(stage.path("a"), "content").expect("written");
        assert_eq!(stage.killed_in(create("a", file), Some(true), |_| ()), OK);
        assert_eq!(
            stage.killed_in(create("a", file), None, |_| ()),
            EXIST,
            "it is in use"
        );
        assert_eq!(
            fs::read_to_string(stage.path("a")).expect("read"),
            "content"
        );
        let made = |vms: &Path| fs::create_dir(vms.join("d")).expect("made");
        assert_eq!(stage.killed_in(create("d", directory), None, made), OK);
        let used = |vms: &Path| fs::write(vms.join("d/f"), "").expect("written");
        assert_eq!(stage.killed_in(create("d", directory), None, used), EXIST);
        let made = |vms: &Path| {
            std::os::unix::fs::symlink("there", vms.join("l")).expect("made");
        };
        assert_eq!(stage.killed_in(create("l", link), None, made), OK);
        assert_eq!(
            fs::read_link(stage.path("l")).expect("read"),
            Path::new("there")
        );
    }

    /// A file by which one of two guests knows that it is the only one.
    #[test]
    fn a_lock_that_another_got_stays_his() {
        let stage = Stage::new();
        let before = process(stage.place.path());
        let ledger = before.ledger.as_ref().expect("a ledger");
        let place = at(&before, "lock");
        let client = "192.0.2.2".parse().expect("an address");
        let other = ledger.known(client, b"theirs", (place.dir, place.name));
        let other = ledger.begin(other.id, ledger.place(place.dir, place.name), None);
        fs::write(stage.path("lock"), "").expect("made");
        ledger.end(other, true);
        drop(before);
        let create = |export: &Export| Args::Create {
            at: at(export, "lock"),
            what: Create::File(How::Guarded(MODE)),
        };
        assert_eq!(stage.killed_in(create, None, |_| ()), EXIST);
    }

    #[test]
    fn a_link_and_guarded_attributes_are_found_done() {
        let stage = Stage::new();
        process(stage.place.path());
        fs::write(stage.path("a"), "").expect("written");
        let find = |export: &Export, name: &str| {
            let root = Who::root();
            let found = export
                .tree
                .lookup(&root, &export.tree.root(), name.as_bytes());
            found.expect("found")
        };
        let link = |export: &Export| Args::Link {
            file: handle(export, &find(export, "a").key),
            at: at(export, "b"),
        };
        let made = |vms: &Path| fs::hard_link(vms.join("a"), vms.join("b")).expect("linked");
        assert_eq!(stage.killed_in(link, None, made), OK);
        fs::remove_file(stage.path("b")).expect("removed");
        fs::write(stage.path("b"), "").expect("written");
        assert_eq!(stage.killed_in(link, None, |_| ()), EXIST, "another file");
        let set = |export: &Export| {
            let found = find(export, "a");
            Args::SetAttr {
                file: handle(export, &found.key),
                set: MODE,
                only_if: Some(found.attributes.changed),
            }
        };
        let made = |vms: &Path| {
            let mode = std::os::unix::fs::PermissionsExt::from_mode(0o640);
            fs::set_permissions(vms.join("a"), mode).expect("set");
        };
        assert_eq!(stage.killed_in(set, None, made), OK);
    }
}
