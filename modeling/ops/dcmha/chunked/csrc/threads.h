/* Tasks for the threads of PyTorch's OpenMP runtime.

   `GOMP_parallel` is the function that gcc calls for a parallel region; LLVM's runtime has it too. Calling it by name
   gives code of any compiler the threads that PyTorch has started already. Where the process has no such function, one
   thread does all tasks. A runtime may give fewer threads than asked for, as inside another parallel region. */

#ifndef DYNATTN_THREADS_H
#define DYNATTN_THREADS_H

extern void GOMP_parallel(void (*)(void *), void *, unsigned, unsigned) __attribute__((weak));

/* Does task `index`; `thread` counts from 0 the threads that take part. */
typedef void (*task_function)(const void *context, long index, long thread);

typedef struct {
    task_function function;
    const void *context;
    long count, next_index, next_thread;
} task_list;

static void work_on_tasks(void *list) {
    task_list *tasks = list;
    long index, thread = __atomic_fetch_add(&tasks->next_thread, 1, __ATOMIC_RELAXED);
    while ((index = __atomic_fetch_add(&tasks->next_index, 1, __ATOMIC_RELAXED)) < tasks->count)
        tasks->function(tasks->context, index, thread);
}

/* Does tasks 0 to `count` - 1, each begun in this order by the next thread that is free. */
static void for_each_task(task_function function, const void *context, long count, long threads) {
    task_list tasks = {function, context, count, 0, 0};
    if (threads > count) threads = count;
    if (threads > 1 && GOMP_parallel)
        GOMP_parallel(work_on_tasks, &tasks, threads, 0);
    else
        work_on_tasks(&tasks);
}

#endif
